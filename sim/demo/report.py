"""The demo's last word: a table of the runs, and sentences that the numbers make."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from sim.demo.figures import DemoFigures

ALIKE = 0.05


def result_table(runs: Sequence[DemoFigures]) -> Table:
    """One row per policy; 80 columns wide."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("\npolicy", no_wrap=True)
    for name in (
        "\nsent", "\nerrors", "TTFT ms\np50", "\np99", "\nmean", "cached\nshare", "prefill\nms saved",
        "\nspills",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        result = run.result
        table.add_row(
            result.policy,
            str(result.requests),
            str(result.errors),
            _ms(result.ttft_s.p50),
            _ms(result.ttft_s.p99),
            _ms(result.ttft_s.mean),
            _share(result.cached_share),
            f"{run.saved_prefill_ms:,.0f}",
            "-" if result.spills is None else str(result.spills),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1_000:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def explanation(runs: Sequence[DemoFigures], prefill_s_per_token: float) -> list[str]:
    """What the table says, in sentences: the last policy against the first. Every claim is computed."""
    if len(runs) < 2:
        return []
    first, last = runs[0], runs[-1]
    before, after = first.result, last.result
    if not first.prompt_tokens or not last.prompt_tokens:
        return ["At least one run has no answered request, so there is nothing to compare."]
    said = [
        f"{after.policy} found {_share(after.cached_share)} of the prompt tokens in the chosen replica's "
        f"cache, {before.policy} {_share(before.cached_share)}; one cache that forgets nothing would have "
        f"had {_share(after.ideal_cached_share)}."
    ]
    computed_before = first.prompt_tokens - first.cached_tokens
    computed_after = last.prompt_tokens - last.cached_tokens
    fewer = computed_before - computed_after
    more_or_less = "fewer" if fewer >= 0 else "more"
    said.append(
        f"Its replicas computed {abs(fewer):,} prompt tokens {more_or_less} ({computed_after:,} instead of "
        f"{computed_before:,}), about {abs(fewer) * prefill_s_per_token:.1f} s of prefill at "
        f"{prefill_s_per_token * 1_000:.2f} ms per token, measured on idle replicas at the start."
    )
    if before.ttft_s.p50 and after.ttft_s.p50 and before.ttft_s.p99 and after.ttft_s.p99:
        said.append(
            f"The median wait for the first token was {_compared(before.ttft_s.p50, after.ttft_s.p50)}, "
            f"the 99th percentile {_compared(before.ttft_s.p99, after.ttft_s.p99)}."
        )
    if first.burst_ttft_p50_s and last.burst_ttft_p50_s:
        said.append(
            "For the conversations whose system prompt became popular the median was "
            f"{_compared(first.burst_ttft_p50_s, last.burst_ttft_p50_s)}."
        )
    if after.spills:
        who = "One request" if after.spills == 1 else f"{after.spills} requests"
        said.append(f"{who} left a warmer replica because the delay there was priced above the hit's worth.")
    return said


def _compared(before_s: float, after_s: float) -> str:
    """``after`` against ``before`` in words.

    >>> _compared(0.9, 0.3), _compared(0.5, 0.51), _compared(0.3, 0.6)
    ('300 ms instead of 900 ms (3.0 times shorter)', '510 ms, about the same (500 ms)', \
'600 ms instead of 300 ms (2.0 times longer)')
    """
    if abs(after_s - before_s) <= ALIKE * before_s:
        return f"{after_s * 1_000:,.0f} ms, about the same ({before_s * 1_000:,.0f} ms)"
    ratio, word = (before_s / after_s, "shorter") if after_s < before_s else (after_s / before_s, "longer")
    return f"{after_s * 1_000:,.0f} ms instead of {before_s * 1_000:,.0f} ms ({ratio:.1f} times {word})"
