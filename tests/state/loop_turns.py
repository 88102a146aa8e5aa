"""Processor time of each turn of the event loop: what other programs do meanwhile is not in it."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def turns_ms() -> Iterator[list[float]]:
    """Milliseconds of processor time of every callback that the current thread's asyncio loop runs.

    A request that becomes due while a callback runs waits for its end: this is by how much it can be late.
    Garbage collection is off meanwhile: it is the process's, not the callback's.
    """
    found: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.append(1e3 * (time.thread_time() - began))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        gc.collect()
        gc.disable()
        try:
            yield found
        finally:
            gc.enable()


def quantiles(values: list[float]) -> str:
    """p50, p99, p99.9 and the largest, for a table."""
    ordered = sorted(values)
    shown = (ordered[int(len(ordered) * share)] for share in (0.5, 0.99, 0.999))
    return " ".join(f"{one:>8.2f}" for one in (*shown, ordered[-1]))
