"""Progress where there is no terminal: lines, and not too many."""

import io

from rich.console import Console

from sim.progress_view import LINE_EVERY_S, ProgressView


def test_long_work_tells_how_far_it_is() -> None:
    now = 0.0
    out = io.StringIO()
    with ProgressView(Console(file=out), clock=lambda: now) as view:
        for done in range(0, 1_001, 10):
            view.update("round_robin", done, 1_000)
            now += 1.25
        view.update("round_robin", 1_000, 1_000)
    assert out.getvalue().splitlines() == [
        "round_robin: 1,000 requests",
        "round_robin: 240 of 1,000",
        "round_robin: 480 of 1,000",
        "round_robin: 720 of 1,000",
        "round_robin: 960 of 1,000",
        "round_robin: done",
    ]


def test_jobs_side_by_side_have_lines_of_their_own() -> None:
    now = 0.0
    out = io.StringIO()
    with ProgressView(Console(file=out), unit="tries", clock=lambda: now) as view:
        view.update("a", 0, 2)
        now = LINE_EVERY_S
        view.update("b", 0, 2)
        view.update("a", 1, 2)
        view.update("b", 1, 2)
    assert out.getvalue().splitlines() == ["a: 2 tries", "b: 2 tries", "a: 1 of 2"]
