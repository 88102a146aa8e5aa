"""How many replicas: work over the utilization ceiling, and first tokens in time; then what each one does."""

from sim.plan.plan_error import PlanError
from sim.plan.queueing import most_offered, smallest_pool
from sim.plan.replica_cost import ReplicaCost
from sim.plan.worksheet import Worksheet


def write_fleet_size(sheet: Worksheet, cost: ReplicaCost, prefill: str, square: str) -> bool:
    """Batch, work, replicas, in the current scope; ``False`` if no batch keeps the promise per token.

    Raises ``PlanError`` when not even one request fits into memory.

    ``prefill`` and ``square`` name a request's prefill in milliseconds, mean and mean square.
    """
    formula = "(sequence_us + (prompt_tokens + output_tokens / 2) * context_ns / 1000) / 1000"
    sheet.line("sequence_ms", formula, "ms", "a step longer by this per decoding sequence: its KV is read")
    says = "batch at which the promise per token is just kept, prefills of others included"
    formula = f"(slo_tpot_ms - step_ms) / (sequence_ms + {prefill} / output_tokens)"
    if sheet.line("batch_tpot", formula, "sequences", says) < 1.0:
        return False
    says = "batch that fits into memory; a shared prefix is counted for each, to leave room for the cache"
    if sheet.line("batch_kv", "kv_tokens / (prompt_tokens + output_tokens)", "sequences", says) < 1.0:
        tokens = sheet["prompt_tokens"] + sheet["output_tokens"]
        raise PlanError(
            f"traffic: a request of {tokens:,.0f} tokens, prompt and reply, does not fit into "
            f"{sheet['kv_tokens']:,.0f} tokens of KV; take more or larger GPUs, or fewer bits"
        )
    limits = "batch_tpot, batch_kv, max_running"
    if cost.math_us:
        says = "batch at which math hides reading the weights: more gain nothing"
        sheet.line("batch_math", "(step_ms - fixed_ms) / math_us * 1000", "sequences", says)
        limits += ", batch_math"
    sheet.line("batch", f"max(1, floor(min({limits})))", "sequences", "batch of a full replica")
    says = "decode of one request, its share of the steps it is in"
    sheet.line("decode_ms", "output_tokens * (step_ms / batch + sequence_ms)", "ms", says)
    says = "replica-seconds of prefill that arrive in a second"
    sheet.line("prefill_work", f"requests_per_s * {prefill} / 1000", "replicas", says)
    says = "replica-seconds of decode that arrive in a second"
    sheet.line("decode_work", "requests_per_s * decode_ms / 1000", "replicas", says)
    sheet.line("work", "prefill_work + decode_work", "replicas", "both")
    sheet.line("replicas_work", "ceil(work / max_utilization)", "replicas", "for the work")
    _first_tokens(sheet, prefill, square)
    sheet.line("replicas", "max(replicas_work, replicas_ttft)", "replicas", "needed")
    return True


def _first_tokens(sheet: Worksheet, prefill: str, square: str) -> None:
    says = "prefill of one request, with the decode work of the steps it rides in"
    sheet.line("service_ms", f"{prefill} + batch * sequence_ms", "ms", says)
    says = "mean remaining work of a prefill that is met: E[S^2] / (2 E[S])"
    formula = f"({square} + service_ms ** 2 - {prefill} ** 2) / (2 * service_ms)"
    residual = sheet.line("residual_ms", formula, "ms", says)
    says = "a request may wait, mean: promise and cold prefill, less its own prefill"
    budget = sheet.line("budget_ms", "slo_ttft_ms + cold_ms - service_ms", "ms", says)
    offered = sheet.line(
        "offered", "requests_per_s * service_ms / 1000", "replicas", "busy with prefill, mean"
    )
    late = 1.0 - sheet["slo_share"]
    how = "fewest at which late_share is at most 1 - slo_share"
    says = "for first tokens in time, if work were dealt out perfectly (one queue for all)"
    fewest = smallest_pool(offered, budget, residual, late)
    sheet.found("replicas_ttft", fewest, "replicas", says, how)
    says = "of requests then wait longer than they may"
    tail = "exp(-max(0, budget_ms) * (replicas_ttft - offered) / residual_ms)"
    sheet.line("late_share", f"erlang_c(replicas_ttft, offered) * {tail}", "", says)
    says = "of its time that a replica may prefill, if requests were dealt out blindly (a queue for each)"
    how = (
        "largest share rho at which rho * exp(-budget_ms * (1 - rho) / residual_ms) is at most 1 - slo_share"
    )
    sheet.found("blind_rho", most_offered(1, budget, residual, late), "", says, how)
    says = "for first tokens in time, dealt out blindly: a router that sees work needs fewer"
    sheet.line("replicas_blind", "ceil(offered / blind_rho)", "replicas", says)


def write_at_that_size(sheet: Worksheet) -> None:
    """What each of ``replicas`` replicas does."""
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
    formula = "running * (prompt_tokens + output_tokens / 2) / kv_tokens"
    sheet.line("kv_use", formula, "", "of KV room they hold")
    says = "prefill of one request, with the decode work of the steps it rides in"
    sheet.line("ride_ms", "prefill_ms + running * sequence_ms", "ms", says)
    says = "mean remaining work of a prefill that is met, at that batch"
    formula = "(prefill_ms2 + ride_ms ** 2 - prefill_ms ** 2) / (2 * ride_ms)"
    sheet.line("met_ms", formula, "ms", says)
    sheet.line("busy", "requests_per_s * ride_ms / 1000", "replicas", "busy with prefill, mean")
    says = "mean wait for prefills ahead, work dealt out perfectly"
    sheet.line("wait_ms", "erlang_c(replicas, busy) * met_ms / (replicas - busy)", "ms", says)
    says = "mean wait, dealt out blindly (Pollaczek and Khinchine)"
    sheet.line("blind_wait_ms", "busy / replicas / (1 - busy / replicas) * met_ms", "ms", says)
    formula = "wait_ms + (step_ms + running * sequence_ms) / 2 + ride_ms"
    sheet.line("ttft_ms", formula, "ms", "first token, mean: wait, half a step, own prefill")
