"""How far long work is: a bar on a terminal, plain lines elsewhere; always on standard error."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 30.0


class ProgressView:
    """A context in which ``update`` shows a named job's progress.

    Elsewhere than on a terminal a job gets one line when it begins, one when it is done, and between them how
    far it is every ``LINE_EVERY_S`` seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        unit: str = "requests",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``unit``: what is counted."""
        self._unit = unit
        self._clock = clock
        self._line_at_s: dict[str, float] = {}
        self._console = console or Console(file=sys.stderr)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, bool] = {}

    def __enter__(self) -> "ProgressView":
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def update(self, job: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``job`` are over."""
        if self._bars is not None:
            if job not in self._tasks:
                self._tasks[job] = self._bars.add_task(job, total=total)
            self._bars.update(self._tasks[job], completed=done)
            return
        if job not in self._said:
            self._said[job] = False
            self._line(f"{job}: {total:,} {self._unit}")
            self._line_at_s[job] = self._clock()
        if done < total and self._clock() - self._line_at_s[job] >= LINE_EVERY_S:
            self._line_at_s[job] = self._clock()
            self._line(f"{job}: {done:,} of {total:,}")
        if done >= total and not self._said[job]:
            self._said[job] = True
            self._line(f"{job}: done")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)
