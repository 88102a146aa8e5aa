"""Traffic on the worksheet: requests as averages, or read off a trace with its ideal hit rate.

Either way the plan goes on with the same quantities: requests per second, mean lengths, the share of prompt
tokens that comes from a cache, and the mean and the spread of a request's prefill, warm, cold and mixed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sim.bounds import InfiniteCache
from sim.plan.config import NumbersTraffic, TraceTraffic
from sim.plan.plan_error import PlanError
from sim.plan.replica_cost import ReplicaCost
from sim.plan.worksheet import Worksheet
from sim.trace_remarks import tell_remarks
from sim.workload.arrivals import plan_arrivals
from sim.workload.sources import open_trace
from sim.workload.trace import Trace, TraceError


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace and what an infinite cache would have had of it."""

    prompt_tokens: int
    output_tokens: int
    ideal_tokens: int


def write_traffic(
    sheet: Worksheet, traffic: NumbersTraffic | TraceTraffic, cost: ReplicaCost
) -> Trace | None:
    """The traffic's lines; the trace it was read from, if any. Raises ``PlanError``."""
    if isinstance(traffic, NumbersTraffic):
        _numbers(sheet, traffic, cost)
        return None
    return _trace(sheet, traffic, cost)


def read_trace_named(name: str, requests: int | None) -> Trace:
    """The trace ``name`` stands for, its remarks told; raises ``PlanError``."""
    try:
        trace = open_trace(name, requests=requests)
    except TraceError as error:
        raise PlanError(f"trace: {error}") from None
    tell_remarks(trace)
    return trace


def traced_requests(trace: Trace) -> list[TracedRequest]:
    """The trace's requests in order of sending, each with its ideal hit."""
    cache = InfiniteCache(trace.block_tokens)
    return [
        TracedRequest(
            request.prompt_tokens,
            request.output_tokens,
            cache.arrived(request.block_ids, request.prompt_tokens),
        )
        for request in trace.requests
    ]


def _numbers(sheet: Worksheet, traffic: NumbersTraffic, cost: ReplicaCost) -> None:
    sheet.given("requests_per_s", traffic.requests_per_s, "requests/s", "arrivals", "plan")
    sheet.given("prompt_tokens", traffic.prompt_tokens, "tokens", "prompt, mean", "plan")
    says = "of it found cached by a warm request"
    sheet.given("shared_tokens", traffic.shared_tokens, "tokens", says, "plan")
    sheet.given("warm_share", traffic.warm_share, "", "of requests are warm", "plan")
    sheet.given("prefixes", traffic.prefixes, "", "different shared prefixes in circulation", "plan")
    sheet.given("output_tokens", traffic.output_tokens, "tokens", "reply, mean", "plan")
    sheet.given("spread", traffic.spread, "", "standard deviation of the logarithm of lengths", "plan")
    sheet.line("new_tokens", "prompt_tokens - shared_tokens", "tokens", "left to prefill when warm")
    sheet.line("hit_rate", "warm_share * shared_tokens / prompt_tokens", "", "of prompt tokens cached")
    sheet.line("cold_ms", cost.prefill_formula("prompt_tokens"), "ms", "prefill, nothing cached")
    sheet.line("warm_ms", cost.prefill_formula("new_tokens", "shared_tokens"), "ms", "prefill, warm")
    sheet.line("prefill_ms", "warm_share * warm_ms + (1 - warm_share) * cold_ms", "ms", "prefill, mean")
    square = "exp(spread ** 2) * (warm_share * warm_ms ** 2 + (1 - warm_share) * cold_ms ** 2)"
    sheet.line("prefill_ms2", square, "ms²", "mean square of it: long prefills hold up others more than once")
    sheet.line("cold_ms2", "exp(spread ** 2) * cold_ms ** 2", "ms²", "the same, nothing cached")


def _trace(sheet: Worksheet, traffic: TraceTraffic, cost: ReplicaCost) -> Trace:
    trace = read_trace_named(traffic.trace, traffic.requests)
    requests = traced_requests(trace)
    count = len(requests)
    counted = f"mean over the {count} requests of {trace.name}"
    if trace.in_sessions:
        turns = count / len({request.session for request in trace.requests})
        sheet.given("starts_per_s", traffic.rate, "sessions/s", "sessions that start", "plan")
        sheet.given("turns", turns, "requests", "of a session", counted)
        sheet.line("requests_per_s", "starts_per_s * turns", "requests/s", "arrivals")
    else:
        plan = plan_arrivals(trace, rate=1.0)
        span_s = max(arrival.at_s or 0.0 for arrival in plan)
        sheet.given("recorded_per_s", count / span_s if span_s else 0.0, "requests/s", "as recorded", counted)
        sheet.given("rate", traffic.rate, "", "times as fast", "plan")
        sheet.line("requests_per_s", "recorded_per_s * rate", "requests/s", "arrivals")

    def mean(name: str, unit: str, says: str, value: Callable[[TracedRequest], float], how: str) -> None:
        sheet.found(name, sum(map(value, requests)) / count, unit, says, how)

    def cold(one: TracedRequest) -> float:
        return cost.prefill_ms(one.prompt_tokens)

    def warm(one: TracedRequest) -> float:
        return cost.prefill_ms(one.prompt_tokens - one.ideal_tokens, one.ideal_tokens)

    mean("prompt_tokens", "tokens", "prompt", lambda one: one.prompt_tokens, counted)
    mean("output_tokens", "tokens", "reply", lambda one: one.output_tokens, counted)
    ideal = "what one infinite cache had of a prompt"
    mean("ideal_tokens", "tokens", ideal, lambda one: one.ideal_tokens, f"replayed; {counted}")
    sheet.line("ideal_hit_rate", "ideal_tokens / prompt_tokens", "", "of prompt tokens, at best")
    sheet.given("of_ideal", traffic.of_ideal, "", "of it that routing and capacity reach", "plan")
    sheet.line("hit_rate", "ideal_hit_rate * of_ideal", "", "of prompt tokens cached")
    each = f"max(step_ms, fixed_ms + new * token_us * (...) / 1000) of each request; {counted}"
    mean("cold_ms", "ms", "prefill, nothing cached", cold, each)
    mean("warm_ms", "ms", "prefill, all cached that can be", warm, each)
    sheet.line("prefill_ms", "of_ideal * warm_ms + (1 - of_ideal) * cold_ms", "ms", "prefill, mean")
    mean("cold_ms2", "ms²", "mean square, nothing cached", lambda one: cold(one) ** 2, each)
    mean("warm_ms2", "ms²", "mean square, all cached that can be", lambda one: warm(one) ** 2, each)
    says = "mean square of it: long prefills hold up others more than once"
    sheet.line("prefill_ms2", "of_ideal * warm_ms2 + (1 - of_ideal) * cold_ms2", "ms²", says)
    return trace
