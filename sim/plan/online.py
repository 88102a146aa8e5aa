"""Online: tokens per second, replica-seconds per second, utilization ceiling, replicas, dollars."""

from math import inf

from sim.plan.config import OnlinePlan
from sim.plan.fleet_size import write_at_that_size, write_fleet_size
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.traffic_sheet import write_traffic
from sim.plan.trials import Trial, conclude_hit_rate, search_trials
from sim.plan.worksheet import Report, Worksheet
from sim.simulate import Progress


def plan_online(plan: OnlinePlan, *, simulated: bool = True, progress: Progress | None = None) -> Report:
    """The finished plan; with ``simulated`` the answer is tried under the virtual clock.

    Raises ``PlanError``.
    """
    sheet = Worksheet(plan.kind, plan.title or f"Online: {describe(plan.replica)}")
    sheet.section("One replica")
    cost = write_replica(sheet, plan.replica)
    sheet.section("Traffic")
    trace = write_traffic(sheet, plan.traffic, cost)
    sheet.line("prompt_tps", "requests_per_s * prompt_tokens", "tokens/s", "prompt tokens that arrive")
    sheet.line("new_tps", "prompt_tps * (1 - hit_rate)", "tokens/s", "of them left to prefill")
    sheet.line("output_tps", "requests_per_s * output_tokens", "tokens/s", "reply tokens to generate")
    _promise(sheet, plan, cost)
    sheet.section("Replicas")
    if not write_fleet_size(sheet, cost, "prefill_ms", "prefill_ms2"):
        sheet.conclude(
            f"No batch meets {plan.slo.tpot_ms:g} ms per token: one step alone takes {sheet['step_ms']:.1f} "
            "ms. Take a faster GPU, more of them per replica, or a smaller precision."
        )
        return sheet.done()
    sheet.section("At that size")
    write_at_that_size(sheet)
    if trace is None:
        _cache_room(sheet)
    sheet.section("Dollars")
    _dollars(sheet, plan)
    sheet.section("What caching gives")
    _caching(sheet, cost)
    replicas = int(sheet["replicas"])
    sheet.conclude(
        f"{replicas} replicas ({replicas * cost.gpus} GPUs), {sheet['dollars_h']:,.2f} dollars an hour: "
        f"{sheet['prompt_dollars_m']:.4f} per million prompt tokens, {sheet['reply_dollars_m']:.3f} per "
        "million reply tokens."
    )
    uncached = sheet["uncached_replicas"]
    instead = "no number of replicas would do" if uncached == inf else f"it would be {uncached:g}"
    blind = max(sheet["replicas_work"], sheet["replicas_blind"])
    sheet.conclude(f"Without a prefix cache {instead}; with one, but requests dealt out blindly, {blind:g}.")
    if plan.simulate is not None and simulated:
        trial = Trial.of(plan.simulate, plan.traffic, plan.slo, cost, trace, progress)
        search_trials(sheet, trial, replicas, plan.slo.share)
        conclude_hit_rate(sheet, "hit_rate", "simulated_hit_rate")
    return sheet.done()


def _promise(sheet: Worksheet, plan: OnlinePlan, cost: ReplicaCost) -> None:
    sheet.section("What is promised")
    says = "first token, on top of a prompt's own cold prefill"
    sheet.given("slo_ttft_ms", plan.slo.ttft_ms, "ms", says, "plan")
    sheet.given("slo_tpot_ms", plan.slo.tpot_ms, "ms", "per token after the first", "plan")
    sheet.given("slo_share", plan.slo.share, "", "of requests must have their first token in time", "plan")
    sheet.given("max_utilization", plan.max_utilization, "", "ceiling whatever latency allows", "plan")
    sheet.given("max_running", cost.max_running, "", "sequences in a batch, at most", "plan")


def _cache_room(sheet: Worksheet) -> None:
    need = sheet.line("prefix_tokens", "prefixes * shared_tokens", "tokens", "that the shared prefixes take")
    formula = "replicas * (kv_tokens - running * (prompt_tokens - shared_tokens + output_tokens))"
    says = "room for them beside what runs, all replicas"
    room = sheet.line("cache_tokens", formula, "tokens", says)
    if need > room:
        text = (
            f"The shared prefixes take {need:,.0f} tokens, the fleet has room for {room:,.0f}: plan with a "
            "smaller warm_share, or see kind: tiers."
        )
        sheet.note(text)
        sheet.conclude(text)


def _dollars(sheet: Worksheet, plan: OnlinePlan) -> None:
    sheet.given("gpu_hour_dollars", plan.gpu_hour_dollars, "dollars/h", "one GPU", "plan")
    sheet.line("dollars_h", "replicas * gpus * gpu_hour_dollars", "dollars/h", "the fleet")
    sheet.line("prompt_share", "prefill_work / work", "", "of the bill for prompts")
    formula = "dollars_h * prompt_share / (prompt_tps * 3600 / 1000000)"
    sheet.line("prompt_dollars_m", formula, "dollars/M tokens", "prompt tokens, cached ones included")
    formula = "dollars_h * (1 - prompt_share) / (output_tps * 3600 / 1000000)"
    sheet.line("reply_dollars_m", formula, "dollars/M tokens", "reply tokens")


def _caching(sheet: Worksheet, cost: ReplicaCost) -> None:
    says = "best prefill speed-up at this hit rate, if prefill were linear"
    sheet.line("speedup_bound", "1 / (1 - hit_rate)", "times", says)
    sheet.line("speedup", "cold_ms / prefill_ms", "times", "prefill speed-up, mean")
    sheet.line("warm_speedup", "cold_ms / warm_ms", "times", "prefill speed-up of a warm request")
    formula = "(step_ms + running * sequence_ms) / 2 + step_ms + running * sequence_ms"
    says = "TTFT that no hit rate goes below: half a running step, and one step of its own"
    sheet.line("ttft_floor_ms", formula, "ms", says)
    sheet.note("Without a cache every prefill is cold:")
    with sheet.scope("uncached"):
        if write_fleet_size(sheet, cost, "cold_ms", "cold_ms2"):
            return
    with sheet.scope("uncached"):
        sheet.found("replicas", inf, "replicas", "needed", "no batch keeps the promise per token")
