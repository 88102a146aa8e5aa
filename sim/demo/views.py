"""How the demo shows itself: a live picture on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from textwrap import shorten
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sim.demo.play_script import RequestRecord
from sim.demo.run_board import RunBoard

TEXT_WIDTH = 96
TALK_ROWS = 3
REASON_STYLES = {
    "warm": "green",
    "spill": "yellow",
    "cold": "cyan",
    "retry": "red",
    "panic": "red",
    "failed": "red",
}


class View(Protocol):
    """What a run tells about itself."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """One line about what happens now."""

    def changed(self, board: RunBoard, record: RequestRecord | None = None) -> None:
        """The board has changed; ``record`` is the request that did it, if one did."""


class PlainView:
    """One line per event, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        """Print it."""
        self._print(text)

    def changed(self, board: RunBoard, record: RequestRecord | None = None) -> None:
        """Print the request; the fleet's own figures change too often for lines."""
        if record is not None:
            self._print(f"{board.policy} {board.done:3d}/{board.total_requests}  {_line(board, record)}")
            for who, text in _exchange(record):
                self._print(f"    {who}: {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A picture that is drawn again as things change; what was said stays above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print it above the picture."""
        self._console.print(text, markup=False, highlight=False)

    def changed(self, board: RunBoard, record: RequestRecord | None = None) -> None:
        """Draw the board."""
        self._live.update(
            Group(_head(board), "", _replica_table(board), "", _recent_table(board), "", _talk(board))
        )


def make_view(console: Console) -> View:
    """The live picture if ``console`` is a terminal, lines otherwise."""
    return LiveView(console) if console.is_terminal else PlainView(console)


def _line(board: RunBoard, record: RequestRecord) -> str:
    answer = record.answer
    when = f"{record.sent_at_s + answer.e2e_s:6.1f} s  {record.conversation} turn {record.turn}"
    if answer.error is not None:
        return f"{when}: FAILED, {answer.error} {answer.error_detail}"
    where = (
        f" -> {answer.replica} {answer.reason} (matched {answer.matched_tokens})" if answer.replica else ""
    )
    return (
        f"{when}{where}: {answer.cached_tokens} of {answer.prompt_tokens} tokens cached, saves "
        f"{board.saved_ms(answer.cached_tokens or 0):.0f} ms, TTFT {(answer.ttft_s or 0.0) * 1_000:.0f} ms"
    )


def _exchange(record: RequestRecord) -> list[tuple[str, str]]:
    """Who said what in this turn, cut to a line."""
    said = [("user", record.messages[-1]["content"])]
    if record.answer.error is None:
        said.append(("reply", record.answer.text))
    return [(who, shorten(text, TEXT_WIDTH, placeholder=" …")) for who, text in said]


def _talk(board: RunBoard) -> Table:
    """The latest turns in words."""
    table = _small_table(("conversation", "says"), ())
    for record in list(board.recent)[: -TALK_ROWS - 1 : -1]:
        for who, text in _exchange(record):
            name = f"{record.conversation} #{record.turn}" if who == "user" else ""
            table.add_row(name, Text(text, style="" if who == "user" else "green"))
    return table


def _head(board: RunBoard) -> Table:
    head = Table.grid(padding=(0, 2))
    for _ in range(3):
        head.add_column(no_wrap=True)
    head.add_row(
        Text(board.policy, style="bold"),
        ProgressBar(total=board.total_requests, completed=board.done, width=20),
        f"{board.done}/{board.total_requests} requests in {board.elapsed_s:.0f} s",
    )
    head.add_row(
        Text(f"errors {board.errors}", style="red" if board.errors else "dim"),
        f"cached {board.hit_share:.0%}, spills {board.spills}",
        f"saved {board.total_saved_ms / 1_000:.1f} s of prefill",
    )
    return head


def _small_table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _replica_table(board: RunBoard) -> Table:
    table = _small_table(
        ("replica",), ("queue", "decoding", "wait ms", "index tokens", "requests", "hit share")
    )
    for name, replica in board.replicas.items():
        table.add_row(
            name,
            str(replica.queued),
            str(replica.decoding),
            f"{replica.wait_ms:.0f}",
            str(replica.index_tokens),
            str(replica.requests),
            f"{replica.hit_share:.0%}",
        )
    return table


def _recent_table(board: RunBoard) -> Table:
    table = _small_table(
        ("conversation", "replica", "reason"), ("prompt", "match", "cached", "saved ms", "TTFT ms")
    )
    for record in reversed(board.recent):
        answer = record.answer
        reason = answer.reason or ""
        if answer.error is not None:
            reason = "failed"
        table.add_row(
            f"{record.conversation} #{record.turn}",
            answer.replica or "",
            Text(reason, style=REASON_STYLES.get(reason, "")),
            _number(answer.prompt_tokens),
            _number(answer.matched_tokens),
            _number(answer.cached_tokens),
            _number(board.saved_ms(answer.cached_tokens or 0)),
            _number(None if answer.ttft_s is None else answer.ttft_s * 1_000),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
