"""Offline batch: a fleet sized by its roofline, the bill by phase, and what would lower it most."""

from dataclasses import dataclass, replace

from sim.plan.config import OfflinePlan
from sim.plan.plan_error import PlanError
from sim.plan.replica_config import RooflineReplica
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.worksheet import Report, Worksheet, identifier
from sim.simulate import SimulationSettings, simulate
from sim.workload.trace import Trace, TraceRequest

SAMPLE = 400
"""Requests of the simulation."""
BLOCK_TOKENS = 50
"""Of the simulation's trace: divides round numbers of tokens."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the batch."""

    reuse: bool
    sorted_by_prefix: bool
    fullest_batch: bool


def plan_offline(plan: OfflinePlan, *, simulated: bool = True) -> Report:
    """The finished plan; with ``simulated`` one replica is tried on a sample. Raises ``PlanError``."""
    sheet = Worksheet(plan.kind, plan.title or f"Offline batch: {describe(plan.replica)}")
    sheet.section("What is asked")
    _asked(sheet, plan)
    now = Way(plan.reuse, plan.sorted_by_prefix, fullest_batch=False)
    sheet.section(f"As things are: {describe(plan.replica)}")
    cost = _way(sheet, plan, "now", plan.replica, plan.gpu_hour_dollars, now)
    _fleet(sheet, plan, "now")
    if simulated:
        sheet.section("Tried on one replica")
        _trial(sheet, plan, cost, now)
    rows = _levers(sheet, plan, now)
    sheet.section("Levers, by dollars saved")
    best_first = sorted(rows, key=lambda row: -sheet[f"{row[1]}_saved"])
    columns = [
        ("lever", ""),
        ("bill", "dollars"),
        ("saved", "dollars"),
        ("replica-hours", "h"),
        ("batch", ""),
    ]
    keys = ("dollars", "saved", "replica_h", "batch")
    sheet.grid("", columns, [[title, *(f"{name}_{key}" for key in keys)] for title, name in best_first])
    title, name = next(row for row in best_first if row[1] != "all")
    sheet.conclude(
        f"The lever that saves most by itself is {title}: {sheet[f'{name}_dollars']:,.0f} dollars; cache, "
        f"order and batch together: {sheet['all_dollars']:,.0f}."
    )
    return sheet.done()


def _asked(sheet: Worksheet, plan: OfflinePlan) -> None:
    sheet.given("requests", plan.requests, "requests", "in all", "plan")
    sheet.given("prompt_tokens", plan.prompt_tokens, "tokens", "prompt", "plan")
    sheet.given("shared_tokens", plan.shared_tokens, "tokens", "of it alike within a group", "plan")
    sheet.given("groups", plan.groups, "groups", "with prefixes of their own", "plan")
    sheet.given("output_tokens", plan.output_tokens, "tokens", "reply", "plan")
    sheet.given("deadline_h", plan.deadline_h, "h", "for all of it", "plan")
    sheet.given("running", plan.running, "sequences", "decoding at once as things are", "plan")
    sheet.line("prompt_m", "requests * prompt_tokens / 1000000", "M tokens", "prompts")
    sheet.line("reply_m", "requests * output_tokens / 1000000", "M tokens", "replies")


def _way(
    sheet: Worksheet, plan: OfflinePlan, name: str, replica: RooflineReplica, gpu_dollars: float, way: Way
) -> ReplicaCost:
    """Everything about one way to run the batch, its replica included."""
    with sheet.scope(name):
        cost = write_replica(sheet, replica)
        _bill(sheet, plan, cost, gpu_dollars, way)
    return cost


def _bill(sheet: Worksheet, plan: OfflinePlan, cost: ReplicaCost, gpu_dollars: float, way: Way) -> None:
    first = "the first of a group is cold"
    if not way.reuse or not plan.shared_tokens:
        sheet.given("hits", 0.0, "", "of requests find their prefix", "no prefix cache")
    elif way.sorted_by_prefix:
        sheet.line("hits", "1 - groups / requests", "", f"of requests find their prefix: {first}")
    else:
        says = "room for prefixes, beside what runs"
        sheet.line("prefix_room", "kv_tokens - running * (prompt_tokens + output_tokens)", "tokens", says)
        says = "of requests find their prefix: in random order, as many as prefixes fit"
        formula = "min(1, max(0, prefix_room / (groups * shared_tokens))) * (1 - groups / requests)"
        sheet.line("hits", formula, "", says)
    sheet.line("cold_ms", cost.prefill_formula("prompt_tokens"), "ms", "prefill, nothing cached")
    formula = cost.prefill_formula("(prompt_tokens - shared_tokens)", "shared_tokens")
    sheet.line("warm_ms", formula, "ms", "prefill, prefix cached")
    sheet.line("prefill_ms", "hits * warm_ms + (1 - hits) * cold_ms", "ms", "prefill, mean")
    _batch(sheet, way)
    formula = "(sequence_us + (prompt_tokens + output_tokens / 2) * context_ns / 1000) / 1000"
    sheet.line("sequence_ms", formula, "ms", "a step longer by this per sequence: its KV is read")
    formula = "max(step_ms, fixed_ms + batch * math_us / 1000) + batch * sequence_ms"
    sheet.line("full_step_ms", formula, "ms", "a decode step")
    sheet.line("decode_ms", "output_tokens * full_step_ms / batch", "ms", "decode of one request, its share")
    sheet.line("replica_h", "requests * (prefill_ms + decode_ms) / 3600000", "h", "replica-hours")
    sheet.line("prefill_share", "prefill_ms / (prefill_ms + decode_ms)", "", "of the bill for prefill")
    sheet.given("gpu_hour_dollars", gpu_dollars, "dollars/h", "one GPU", "plan")
    sheet.line("dollars", "replica_h * gpus * gpu_hour_dollars", "dollars", "the bill")


def _batch(sheet: Worksheet, way: Way) -> None:
    formula = "kv_tokens / (prompt_tokens + output_tokens)"
    says = "that fit into memory"
    if way.reuse and way.sorted_by_prefix:
        formula = "(kv_tokens - shared_tokens) / (prompt_tokens - shared_tokens + output_tokens)"
        says = "that fit into memory, one prefix for all"
    if sheet.line("batch_kv", formula, "sequences", says) < 1.0:
        tokens = sheet["prompt_tokens"] + sheet["output_tokens"]
        raise PlanError(
            f"a request of {tokens:,.0f} tokens, prompt and reply, does not fit into "
            f"{sheet['kv_tokens']:,.0f} tokens of KV; take more or larger GPUs, or fewer bits"
        )
    says = "at which math hides reading the weights: more gain nothing"
    sheet.line("batch_math", "(step_ms - fixed_ms) / math_us * 1000", "sequences", says)
    if way.fullest_batch:
        sheet.line("batch", "max(1, floor(min(batch_kv, batch_math)))", "sequences", "decoding at once")
    else:
        sheet.line("batch", "max(1, floor(min(batch_kv, running)))", "sequences", "decoding at once")


def _fleet(sheet: Worksheet, plan: OfflinePlan, name: str) -> None:
    replicas = sheet.line(
        "replicas", f"ceil({name}_replica_h / deadline_h)", "replicas", "to meet the deadline"
    )
    share = sheet[f"{name}_prefill_share"]
    sheet.conclude(
        f"As things are: {sheet[f'{name}_replica_h']:,.0f} replica-hours, {replicas:g} replicas for "
        f"{plan.deadline_h:g} h, {sheet[f'{name}_dollars']:,.0f} dollars: {share:.0%} of them prefill, "
        f"{1 - share:.0%} decode."
    )


def _levers(sheet: Worksheet, plan: OfflinePlan, now: Way) -> list[tuple[str, str]]:
    """(title, scope) of every lever, each pulled alone, and of all together."""
    rows: list[tuple[str, str]] = []

    def pull(title: str, name: str, replica: RooflineReplica, dollars: float, way: Way) -> None:
        sheet.section(f"Lever: {title}")
        try:
            _way(sheet, plan, name, replica, dollars, way)
        except PlanError as error:
            sheet.note(f"Not possible: {error}")
            return
        with sheet.scope(name):
            sheet.line("saved", "now_dollars - dollars", "dollars", "saved")
        rows.append((title, identifier(name)))

    here, dollars = plan.replica, plan.gpu_hour_dollars
    if plan.shared_tokens and not now.reuse:
        pull("prefix cache, any order", "reuse", here, dollars, replace(now, reuse=True))
    if plan.shared_tokens and not (now.reuse and now.sorted_by_prefix):
        way = replace(now, reuse=True, sorted_by_prefix=True)
        pull("prefix cache, sorted by prefix", "sorted", here, dollars, way)
    pull("the fullest batch", "batch", here, dollars, replace(now, fullest_batch=True))
    for name in plan.precisions:
        if name != here.precision:
            other = here.model_copy(update={"precision": name})
            pull(f"precision {name}", name, other, dollars, now)
    for other_gpu in plan.other_gpus:
        card = here.model_copy(update={"gpu": other_gpu.gpu, "gpus": other_gpu.gpus})
        title = f"{other_gpu.gpus} x {other_gpu.gpu}"
        pull(title, f"on_{other_gpu.gpus}_{other_gpu.gpu}", card, other_gpu.gpu_hour_dollars, now)
    everything = Way(reuse=bool(plan.shared_tokens), sorted_by_prefix=True, fullest_batch=True)
    pull("cache, order and batch together", "all", here, dollars, everything)
    return rows


def _trial(sheet: Worksheet, plan: OfflinePlan, cost: ReplicaCost, way: Way) -> None:
    """A sample, all there from the start, on one replica: how long it takes against the arithmetic."""
    settings = replace(cost.settings(), max_running=plan.running, prefix_caching=way.reuse)
    result = simulate(
        sample_trace(plan, way),
        ["round_robin"],
        replicas=1,
        settings=SimulationSettings(replica=settings, step_time=cost.step_time(), warmup_share=0.0),
    )[0]
    sheet.given("sample", SAMPLE, "requests", "all there from the start", "sim/plan/offline.py")
    how = f"simulated: {SAMPLE} requests on one replica"
    sheet.line("planned_s", "sample * (now_prefill_ms + now_decode_ms) / 1000", "s", "by arithmetic")
    sheet.found("simulated_s", result.wall_s, "s", "simulated", how)
    says = "simulated over planned: below 1, decoding beside prefill reads the weights for nothing more"
    sheet.line("simulated_ratio", "simulated_s / planned_s", "times", says)


def sample_trace(plan: OfflinePlan, way: Way) -> Trace:
    """``SAMPLE`` requests of the batch, groups in turn, or one group after the other."""
    shared = plan.shared_tokens // BLOCK_TOKENS
    full = plan.prompt_tokens // BLOCK_TOKENS
    groups = max(1, min(plan.groups, SAMPLE))
    requests = []
    for number in range(SAMPLE):
        group = number * groups // SAMPLE if way.sorted_by_prefix else number % groups
        ids = [group * full + block for block in range(shared)]
        ids += [(groups + number) * full + block for block in range(shared, full)]
        requests.append(
            TraceRequest(plan.prompt_tokens, plan.output_tokens, tuple(ids), timestamp_ms=number / 1e3)
        )
    return Trace("a sample of the batch", BLOCK_TOKENS, tuple(requests))
