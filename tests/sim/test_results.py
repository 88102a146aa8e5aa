"""From outcomes to figures."""

from io import StringIO

import pytest
from rich.console import Console

from sim.outcome import Outcome
from sim.results import Result, Slo, summarize
from sim.results_table import above_ideal, results_table


def outcome(
    sent_s: float = 0.0,
    ttft_s: float | None = 0.5,
    e2e_s: float = 1.0,
    *,
    prompt: int = 1000,
    output: int = 11,
    cached: int = 0,
    replica: int | None = 0,
    spilled: bool = False,
    error: str | None = None,
    lag_s: float = 0.0,
) -> Outcome:
    return Outcome(sent_s, prompt, output, cached, ttft_s, e2e_s, replica, spilled, error, lag_s)


def result(outcomes: list[Outcome], warmup_share: float = 0.0, replicas: int | None = 2) -> Result:
    return summarize(
        "p",
        outcomes,
        replicas=replicas,
        slo=Slo(ttft_ms=1000, tpot_ms=50),
        cold_prefill_s=lambda tokens: tokens / 1000,
        warmup_share=warmup_share,
        ideal=0.5,
    )


def test_figures_by_hand() -> None:
    made = result(
        [
            outcome(0.0, 0.5, 1.5, cached=500, replica=0),
            outcome(1.0, 1.5, 2.0, prompt=3000, replica=1, spilled=True),
            outcome(2.0, None, 4.0, error="status 503"),
        ]
    )
    assert (made.requests, made.errors, made.spills) == (3, 1, 1)
    assert made.error_kinds == (("status 503", 1),)
    assert (made.ttft_s.mean, made.ttft_s.p50, made.e2e_s.mean) == (1.0, 1.5, 1.75)
    assert made.tpot_ms.mean == pytest.approx(75.0) and made.tpot_ms.p99 == pytest.approx(100.0)
    assert made.cached_share == 500 / 4000
    assert made.max_over_mean_work == pytest.approx(3000 / 1750)
    assert made.wall_s == 6.0
    assert made.ttft_in_slo_share == pytest.approx(2 / 3)
    assert made.in_slo_share == pytest.approx(2 / 3)  # an error is never in SLO


@pytest.mark.parametrize(
    ("ttft_s", "decode_s", "in_slo"),
    [(2.0, 1.5, 1.0), (2.001, 1.5, 0.0), (2.0, 1.501, 0.0), (0.1, 1.501, 0.0)],
)
def test_slo_allows_cold_prefill_and_a_second_of_buffer(
    ttft_s: float, decode_s: float, in_slo: float
) -> None:
    """1,000 prompt tokens: 1 s + 1 s cold prefill; 11 output tokens: 1 s + 10 x 50 ms."""
    assert result([outcome(0.0, ttft_s, ttft_s + decode_s)]).in_slo_share == in_slo


def test_a_single_token_has_no_tpot_and_may_be_in_slo() -> None:
    made = result([outcome(output=1, ttft_s=0.5, e2e_s=0.5)])
    assert made.tpot_ms.mean is None and made.in_slo_share == 1.0


def test_the_warm_up_is_a_share_of_the_sending_time() -> None:
    outcomes = [outcome(float(second), 0.1 * second + 0.1, 10.0) for second in range(9)]
    made = result(outcomes, warmup_share=0.25)  # from second 2 on, that one included
    assert made.requests == 7
    assert made.ttft_s.mean == pytest.approx(0.6)
    assert made.wall_s == 18.0  # warm-up included


def test_percentiles_are_values_that_occurred() -> None:
    made = result([outcome(ttft_s=second / 100, e2e_s=9.0) for second in range(250)])
    assert (made.ttft_s.p50, made.ttft_s.p90, made.ttft_s.p99) == (1.25, 2.25, 2.47)


@pytest.mark.parametrize(("cached", "shown"), [(250, "0.500"), (500, "1.000"), (640, "-")])
def test_a_share_of_the_ideal_is_none_where_more_was_cached(cached: int, shown: str) -> None:
    console = Console(width=300, file=StringIO(), force_terminal=False)
    made = result([outcome(cached=cached)])
    console.print(results_table([made], console))
    assert isinstance(console.file, StringIO)
    row = console.file.getvalue().splitlines()[-2].split()
    assert row[9] == shown and above_ideal(made) is (shown == "-")


def test_nothing_measured_gives_nulls_and_no_crash() -> None:
    made = result([outcome(ttft_s=None, error="closed")], replicas=None).json_object()
    assert made["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert made["cached_share"] is None and made["max_over_mean_work"] is None
    assert made["in_slo_share"] == 0.0 and made["error_kinds"] == {"closed": 1}
    assert result([]).requests == 0


def test_json_names_are_those_of_the_interface() -> None:
    made = result([outcome()]).json_object()
    assert list(made) == [
        "policy",
        "requests",
        "errors",
        "ttft_s",
        "e2e_s",
        "tpot_ms",
        "cached_share",
        "ideal_cached_share",
        "in_slo_share",
        "ttft_in_slo_share",
        "max_over_mean_work",
        "spills",
        "wall_s",
    ]
    assert list(made["ttft_s"]) == list(made["e2e_s"]) == ["mean", "p50", "p90", "p99"]
    assert list(made["tpot_ms"]) == ["mean", "p50", "p99"]
