"""Threads for slow I/O, whose results are taken where everything else is decided."""

import contextlib
import queue
import threading
from collections.abc import Callable

Report = Callable[[], None]
"""What a job's end means; run by whoever takes it."""
Job = Callable[[], Report]
READERS = 2
"""Files read at once."""
CALLERS = 4
"""Peers asked at once."""


class Background:
    """Jobs in threads of their own; each ends in a report.

    >>> done = []
    >>> background = Background()
    >>> background.read(lambda: lambda: done.append("read"))
    >>> background.take(wait_s=10.0); done
    ['read']
    >>> background.close()
    """

    def __init__(self, *, peers: bool = False) -> None:
        """Writes and deletions have one thread, which keeps them in order. ``peers``: some will be asked."""
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._threads = ((self._writes, 1), (self._reads, READERS), (self._calls, CALLERS if peers else 0))
        for jobs, threads in self._threads:
            for _ in range(threads):
                # Daemons: a disk that hangs must not keep the process.
                threading.Thread(target=self._work, args=(jobs,), name="tiers", daemon=True).start()

    def read(self, job: Job) -> None:
        """Run ``job`` beside others."""
        self._reads.put(job)

    def write(self, job: Job) -> None:
        """Run ``job`` after the writes before it."""
        self._writes.put(job)

    def call(self, job: Job) -> None:
        """Run ``job``, which asks a peer, beside others."""
        self._calls.put(job)

    def tell(self, report: Report) -> None:
        """From within a job: it has something to say before its end."""
        self._reports.put(report)

    def take(self, wait_s: float = 0.0) -> None:
        """Run the reports that have come; wait at most ``wait_s`` for the first."""
        try:
            report = self._reports.get(block=wait_s > 0.0, timeout=wait_s or None)
            while True:
                report()
                report = self._reports.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """End the threads after what they are at; what waits behind it is dropped."""
        for jobs, threads in self._threads:
            with contextlib.suppress(queue.Empty):
                while True:
                    jobs.get_nowait()
            for _ in range(threads):
                jobs.put(None)

    def _work(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            self._reports.put(job())
