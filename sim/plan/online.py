"""Online: tokens per second, replica-seconds per second, utilization ceiling, replicas, dollars."""

from math import exp, inf

from sim.plan.config import OnlinePlan
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.traffic_sheet import write_traffic
from sim.plan.trials import Trial, conclude_hit_rate, write_trials
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
    if not _size(sheet, cost, "prefill_ms", "prefill_ms2"):
        sheet.conclude(
            f"No batch meets {plan.slo.tpot_ms:g} ms per token: one step alone takes {sheet['step_ms']:.1f} "
            "ms. Take a faster GPU, more of them per replica, or a smaller precision."
        )
        return sheet.done()
    _check(sheet)
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
    instead = (
        "no number of replicas would keep the promise" if uncached == inf else f"it would be {uncached:g}"
    )
    sheet.conclude(f"Without a prefix cache {instead}.")
    if plan.simulate is not None and simulated:
        fewer = [replicas - 1] if replicas > 1 else []
        trial = Trial.of(plan.simulate, plan.traffic, plan.slo, cost, trace, progress)
        write_trials(sheet, trial, [*fewer, replicas])
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


def _size(sheet: Worksheet, cost: ReplicaCost, prefill: str, square: str) -> bool:
    """Batch, work, ceiling, replicas, in the current scope; ``False`` if no batch is fast enough."""
    formula = "(sequence_us + (prompt_tokens + output_tokens / 2) * context_ns / 1000) / 1000"
    if cost.sequence_us == 0.0:
        formula = "(prompt_tokens + output_tokens / 2) * context_ns / 1000000"
    sheet.line("sequence_ms", formula, "ms", "a step longer by this per decoding sequence: its KV is read")
    says = "batch at which the promise per token is just kept, prefills of others included"
    formula = f"(slo_tpot_ms - step_ms) / (sequence_ms + {prefill} / output_tokens)"
    if sheet.line("batch_tpot", formula, "sequences", says) < 1.0:
        return False
    says = "batch that fits into memory; a shared prefix is counted for each, to leave room for the cache"
    sheet.line("batch_kv", "kv_tokens / (prompt_tokens + output_tokens)", "sequences", says)
    limits = "batch_tpot, batch_kv, max_running"
    if cost.math_us:
        says = "batch at which math hides reading the weights: more gain nothing"
        sheet.line("batch_math", "step_ms / math_us * 1000", "sequences", says)
        limits += ", batch_math"
    sheet.line("batch", f"max(1, floor(min({limits})))", "sequences", "batch of a full replica")
    says = "decode of one request, its share of the steps it is in"
    sheet.line("decode_ms", "output_tokens * (step_ms / batch + sequence_ms)", "ms", says)
    says = "replica-seconds of prefill that arrive in a second"
    sheet.line("prefill_work", f"requests_per_s * {prefill} / 1000", "replicas", says)
    says = "replica-seconds of decode that arrive in a second"
    sheet.line("decode_work", "requests_per_s * decode_ms / 1000", "replicas", says)
    sheet.line("work", "prefill_work + decode_work", "replicas", "both")
    _ceiling(sheet, prefill, square)
    sheet.line("replicas_work", "work / max_utilization", "replicas", "for the work")
    says = "for first tokens in time"
    sheet.line("replicas_ttft", "requests_per_s * service_ms / 1000 / ttft_ceiling", "replicas", says)
    sheet.line("replicas", "ceil(max(replicas_work, replicas_ttft))", "replicas", "needed")
    return True


def _ceiling(sheet: Worksheet, prefill: str, square: str) -> None:
    """The share of its time that a replica may prefill, if first tokens are to be in time.

    The wait for prefills ahead is M/G/1: it exceeds t with probability ``rho * exp(-t (1 - rho) / unit)``,
    exact for exponential prefills, and a good approximation for others with ``unit = E[S^2] / (2 E[S])``.
    """
    says = "prefill of one request, with the decode work of the steps it rides in"
    sheet.line("service_ms", f"{prefill} + batch * sequence_ms", "ms", says)
    says = "mean remaining work of a prefill that is met: E[S^2] / (2 E[S])"
    formula = (
        f"({square} + 2 * {prefill} * batch * sequence_ms + (batch * sequence_ms) ** 2) / (2 * service_ms)"
    )
    unit = sheet.line("residual_ms", formula, "ms", says)
    says = "a request may wait, mean: promise and cold prefill, less its own prefill"
    budget = sheet.line("budget_ms", "slo_ttft_ms + cold_ms - service_ms", "ms", says)
    late = 1.0 - sheet["slo_share"]
    rho = 0.0
    if budget > 0:
        low, high = 0.0, 1.0
        for _ in range(60):
            rho = (low + high) / 2.0
            low, high = (rho, high) if rho * exp(-budget * (1.0 - rho) / unit) <= late else (low, rho)
        rho = low
    how = "largest share at which late_share is at most 1 - slo_share"
    sheet.found("ttft_rho", max(rho, 1e-9), "", "of its time that a replica may prefill", how)
    says = "of requests then wait longer than they may"
    sheet.line("late_share", "ttft_rho * exp(-budget_ms * (1 - ttft_rho) / residual_ms)", "", says)
    sheet.line("ttft_ceiling", "min(ttft_rho, max_utilization)", "", "ceiling of the prefill share")


def _check(sheet: Worksheet) -> None:
    sheet.section("At that size")
    sheet.line("each_per_s", "requests_per_s / replicas", "requests/s", "arrivals at one replica")
    sheet.line("prefill_share", "each_per_s * prefill_ms / 1000", "", "of its time it prefills")
    sheet.line("utilization", "work / replicas", "", "of what a full replica can do")
    says = "sequences that decode at once, by Little's law"
    formula = (
        "each_per_s * output_tokens * step_ms / 1000 / "
        "(1 - prefill_share - each_per_s * output_tokens * sequence_ms / 1000)"
    )
    sheet.line("running", formula, "sequences", says)
    says = "per token after the first"
    sheet.line("tpot_ms", "(step_ms + running * sequence_ms) / (1 - prefill_share)", "ms", says)
    sheet.line(
        "kv_use", "running * (prompt_tokens + output_tokens / 2) / kv_tokens", "", "of KV room they hold"
    )
    says = "mean wait for prefills ahead (Pollaczek-Khinchine)"
    formula = "each_per_s * service_ms / 1000 / (1 - each_per_s * service_ms / 1000) * residual_ms"
    sheet.line("wait_ms", formula, "ms", says)
    formula = "wait_ms + (step_ms + running * sequence_ms) / 2 + service_ms"
    sheet.line("ttft_ms", formula, "ms", "first token, mean: wait, half a step, own prefill")


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
        if _size(sheet, cost, "cold_ms", "cold_ms2"):
            return
    with sheet.scope("uncached"):
        sheet.found("replicas", inf, "replicas", "needed", "no batch keeps the promise per token")
