"""One replica under the virtual clock: the engine's own scheduler and cache, a duration for a model.

A step is an event at its end. Stretches in which the same requests decode and nothing else happens are one
event; an arrival cuts the stretch after the step that is running then, as it would in an engine, which looks
at its queue between steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from replica.batch import Batch
from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.kv_cache.cache_settings import CacheSettings
from replica.prefix_load import PrefixLoad
from replica.scheduler import RequestTooLong, Scheduler, SchedulerLimits
from replica.sequence import Sequence
from sim.event_queue import EventQueue
from sim.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What one replica can hold and do. The defaults are those of the benchmark's emulated replicas."""

    capacity_tokens: int = 3_000_000
    """KV tokens; rounded down to whole blocks. 3 million is a replica with a host-memory tier behind it."""
    max_batched_tokens: int = 8_192
    max_running: int = 128
    max_model_len: int = 200_000
    prefix_caching: bool = True
    cache: Literal["blocks", "radix"] = "blocks"
    """Hash-chained blocks (vLLM's way), or a radix tree of pages as large as a block (SGLang's)."""
    eviction: str = "lru"
    """Of the radix tree: lru, slru, lfu or tlru."""
    tail_slack_tokens: int = 2_048
    """For tlru: what a returning conversation may recompute."""
    shares_prefills: bool = True
    """Of requests with one new prefix the first computes it and the others wait; else each computes it."""
    slowdown: float = 1.0
    """Every step takes so many times what the step-time model says."""

    def scheduler(
        self, block_tokens: int, most_blocks: int | None = None, *, record_events: bool = False
    ) -> Scheduler:
        """An empty cache, of ``most_blocks`` blocks if its capacity is more, and a scheduler.

        ``record_events``: whoever asks for that takes the cache's events. Raises ValueError when the capacity
        is below one block.
        """
        if self.capacity_tokens < block_tokens:
            raise ValueError(
                f"capacity of {self.capacity_tokens} tokens: less than one block of {block_tokens}, raise it"
            )
        blocks = self.capacity_tokens // block_tokens
        if most_blocks is not None:
            blocks = min(blocks, most_blocks)
        eviction = self.eviction if self.cache == "radix" else "lru"
        slack_tokens = self.tail_slack_tokens if eviction == "tlru" else 0
        cache = CacheSettings(self.cache, eviction=eviction, tail_slack_tokens=slack_tokens).make(
            blocks * block_tokens, block_tokens, enabled=self.prefix_caching, record_events=record_events
        )
        return Scheduler(cache, self.limits())

    def limits(self) -> SchedulerLimits:
        """What a step may hold."""
        return SchedulerLimits(
            self.max_running,
            self.max_batched_tokens,
            self.max_model_len,
            shares_prefills=self.shares_prefills,
        )


@dataclass(frozen=True, slots=True)
class ReplicaEvents:
    """Whom a replica tells what happened; each gets the sequence, at the time it happens."""

    first_token: Callable[[Sequence], None]
    finished: Callable[[Sequence], None]
    refused: Callable[[Sequence], None]


class _DecodeRun:
    """``steps`` decode steps in a row; the time of a step grows evenly with the KV it reads.

    >>> run = _DecodeRun(started_s=10.0, steps=3, first_s=1.0, last_s=2.0)
    >>> [run.end_s(step) for step in (1, 2, 3)]
    [11.0, 12.5, 14.5]
    >>> run.step_at(11.0), run.step_at(11.1), run.step_at(12.6)
    (1, 2, 3)
    """

    __slots__ = ("first_s", "growth_s", "started_s", "steps")

    def __init__(self, started_s: float, steps: int, first_s: float, last_s: float) -> None:
        self.started_s = started_s
        self.steps = steps
        self.first_s = first_s
        self.growth_s = (last_s - first_s) / (steps - 1) if steps > 1 else 0.0

    def end_s(self, step: int) -> float:
        """When step number ``step`` (from 1) is over."""
        return self.started_s + step * self.first_s + self.growth_s * step * (step - 1) / 2.0

    def step_at(self, now: float) -> int:
        """The step that runs, or just ends, at ``now``."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.end_s(middle) >= now:
                high = middle
            else:
                low = middle + 1
        return low


class SimulatedReplica:
    """Accepts sequences made of block ids, computes them one step after another, reports through events."""

    __slots__ = (
        "_arrived",
        "_batch",
        "_cache_events",
        "_events",
        "_pulls",
        "_queue",
        "_run",
        "_step_time",
        "_stepping",
        "_to_pull",
        "scheduler",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        queue: EventQueue,
        events: ReplicaEvents,
        cache_events: Callable[[list[CacheEvent]], None] | None = None,
    ) -> None:
        """``cache_events`` gets what each step stored and removed, if the scheduler's cache records it."""
        self.scheduler = scheduler
        """To be read."""
        self._step_time = step_time
        self._queue = queue
        self._events = events
        self._cache_events = cache_events
        self._arrived: list[Sequence] = []
        self._to_pull: dict[Sequence, tuple[int, float]] = {}
        """Of those arrived, who pulls: how many tokens, in how many seconds."""
        self._pulls: dict[Sequence, PrefixLoad] = {}
        """On their way; whose they are is looked at when they have come."""
        self._stepping = False
        self._batch: Batch | None = None
        self._run: _DecodeRun | None = None

    def accept(self, sequence: Sequence) -> None:
        """A request arrives now; it is looked at when the running step is over."""
        self._arrived.append(sequence)
        if not self._stepping:
            self._next_step()
            return
        run = self._run
        if run is not None and (step := run.step_at(self._queue.now)) < run.steps:
            run.steps = step
            self._queue.at(run.end_s(step), self._run_done, run, step)

    def pull(self, sequence: Sequence, tokens: int, seconds: float) -> None:
        """A request arrives that pulls KV of its first ``tokens`` (whole blocks) from another replica.

        Others go on meanwhile. Without room for it the request computes.
        """
        self._to_pull[sequence] = (tokens, seconds)
        self.accept(sequence)

    def _begin_pull(self, sequence: Sequence) -> bool:
        tokens, seconds = self._to_pull.pop(sequence)
        load = self.scheduler.loads.begin(sequence, tokens)
        if load is None:
            return False
        self._pulls[sequence] = load
        self._queue.at(self._queue.now + seconds, self._pulled, sequence, load)
        return True

    def _pulled(self, sequence: Sequence, load: PrefixLoad) -> None:
        if self._pulls.get(sequence) is not load:
            return  # it was lost in a crash
        del self._pulls[sequence]
        loads = self.scheduler.loads
        loads.arrived(load, load.stop)
        loads.end(load)
        self.accept(sequence)

    def crash(self, scheduler: Scheduler) -> list[Sequence]:
        """The process dies; ``scheduler``, empty, is what it has once back. Returns its requests."""
        lost = [*self.scheduler.running, *self.scheduler.waiting, *self._arrived, *self._pulls]
        self.scheduler = scheduler
        self._arrived.clear()
        self._to_pull.clear()
        self._pulls.clear()
        self._stepping = False
        self._batch = self._run = None
        return lost

    def load(self) -> LoadReport:
        """The scheduler's gauges, with those counted as waiting whom it has not seen yet."""
        report = self.scheduler.load()
        unseen = len(self._arrived) + len(self._pulls)
        if not unseen or report.waiting is None:
            return report
        return replace(report, waiting=report.waiting + unseen)

    def _next_step(self) -> None:
        scheduler = self.scheduler
        if self._arrived:
            for sequence in self._arrived:
                if sequence in self._to_pull and self._begin_pull(sequence):
                    continue
                try:
                    scheduler.add(sequence)
                except RequestTooLong:
                    self._events.refused(sequence)
            self._arrived.clear()
        if not scheduler.has_work:
            self._stepping = False
            return
        self._stepping = True
        now = self._queue.now
        steps = scheduler.steps_until_change()
        if steps:
            seconds = self._step_time.seconds
            first_s = seconds(scheduler.decode_batch())
            last_s = seconds(scheduler.decode_batch(steps - 1)) if steps > 1 else first_s
            self._run = run = _DecodeRun(now, steps, first_s, last_s)
            self._queue.at(run.end_s(steps), self._run_done, run, steps)
            return
        batch = scheduler.schedule()
        if batch.empty and self._pulls:  # what it needs is held by a pull, whose end is an arrival
            self._stepping = False
            return
        self._batch = batch
        self._queue.at(now + self._step_time.seconds(batch), self._step_done, batch)

    def _step_done(self, batch: Batch) -> None:
        if batch is not self._batch:
            return  # it was lost in a crash
        finished = self.scheduler.commit(batch)
        self._tell_cache_events()
        for row in batch.prefills:
            if row.samples and row.sequence.output_tokens == 1:
                self._events.first_token(row.sequence)
        for sequence in finished:
            self._events.finished(sequence)
        self._next_step()

    def _run_done(self, run: _DecodeRun, step: int) -> None:
        if self._run is not run or run.steps != step:
            return  # cut short: another event ended it
        self._run = None
        finished = self.scheduler.advance_decodes(step)
        self._tell_cache_events()
        for sequence in finished:
            self._events.finished(sequence)
        self._next_step()

    def _tell_cache_events(self) -> None:
        if self._cache_events is not None and (events := self.scheduler.take_events()):
            self._cache_events(events)
