"""What runs in the next step: continuous batching with chunked prefill under one token budget.

Order within a step: decodes, then chunks of running prefills, then admissions, each by (priority, arrival). A
decode that gets no block preempts the running sequence that comes last in that order (maybe itself), which
loses its blocks and will recompute. Eight tokens a step, two requests, block size 4:

>>> from replica.kv_cache.prefix_cache import PrefixCache
>>> cache = PrefixCache(16, block_size=4)
>>> scheduler = Scheduler(cache, SchedulerLimits(max_running=4, max_batched_tokens=8, max_model_len=64))
>>> scheduler.add(Sequence("a", range(6), max_tokens=4))
>>> scheduler.add(Sequence("b", range(50, 60), max_tokens=4))
>>> for _ in range(3):
...     batch = scheduler.schedule()
...     print([(row.sequence.request_id, row.start, row.count, row.samples) for row in batch.rows])
...     _ = scheduler.commit(batch, {"a": 7, "b": 8})
[('a', 0, 6, True), ('b', 0, 2, False)]
[('a', 6, 1, True), ('b', 2, 7, False)]
[('a', 7, 1, True), ('b', 9, 1, True)]
"""

from bisect import bisect_left, insort
from collections import abc
from operator import attrgetter
from typing import Any

from replica.admission_order import count_overtaken, longest_prefix_first
from replica.batch import Batch, Work
from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.decode_run import changes, steps_that_fit, steps_until_publication
from replica.hot_prefixes import HotPrefixes
from replica.kv_cache.cache import Cache
from replica.limits import RequestTooLong, SchedulerLimits, check_request
from replica.prefix_load import PrefixLoads
from replica.prefix_sharing import defer
from replica.sampled_tokens import sampled_tokens
from replica.sequence import Sequence, Status

__all__ = ["RequestTooLong", "Scheduler", "SchedulerLimits"]

_precedence = attrgetter("precedence")


class Scheduler:
    """Owns the waiting and running sequences; every step is ``batch = schedule()``, run it, ``commit``.

    One batch is in flight at a time. ``abort`` and ``finish`` may come while it is: ``commit`` then drops
    that sequence's rows. Both queues are kept in order of precedence.
    """

    def __init__(self, cache: Cache[Any], limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        """Counter: how often a running sequence lost its blocks."""
        self.hot = HotPrefixes(cache, limits.pinned_blocks) if limits.pinned_blocks else None
        self.loads = PrefixLoads(cache)
        """Prefixes on their way from other tiers; a request is added when its load has ended."""
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._admissions = 0
        self._in_flight: Batch | None = None

    # Requests come and go

    @property
    def has_work(self) -> bool:
        """Somebody waits or runs: ``schedule`` will have rows."""
        return bool(self._sequences)

    def check(self, sequence: Sequence) -> None:
        """Raise what ``add`` would, change nothing.

        Raises ValueError for a request id that is in use, and whatever ``check_request`` raises, such as
        RequestTooLong.
        """
        name = sequence.request_id
        if name in self._sequences:
            raise ValueError(f"request id {name} is in use: give each request its own")
        check_request(sequence, self.limits, self.cache)

    def add(self, sequence: Sequence) -> None:
        """Queue a request; raises what ``check`` does."""
        self.check(sequence)
        name = sequence.request_id
        sequence.arrival = self._arrivals
        self._arrivals += 1
        sequence.precedence = (sequence.priority, sequence.arrival)
        self._sequences[name] = sequence
        insort(self.waiting, sequence, key=_precedence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and release its blocks, which stay hittable. A second call does nothing."""
        if sequence.status is Status.FINISHED:
            return
        del self._sequences[sequence.request_id]
        if sequence.status is Status.RUNNING:
            self._remove(self.running, sequence)
            self.cache.release(sequence)
        else:
            self._remove(self.waiting, sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.prefilling = False

    def abort(self, request_id: str) -> Sequence | None:
        """End a request wherever it is, with reason "abort"; None when it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    # A step

    def schedule(self) -> Batch:
        """Choose the next step's rows and take the blocks they need.

        Empty only when there is no work, or when loads in flight hold the memory it needs. Raises
        RuntimeError while a batch is in flight.
        """
        self._require_no_batch()
        rows: list[Work] = []
        prefilling: list[Sequence] = []
        context = 0
        # Grows shorter at its end when _make_room preempts; what was visited comes first and stays.
        for sequence in self.running:
            if sequence.prefilling:
                prefilling.append(sequence)
                continue
            total = sequence.prompt_tokens + sequence.output_tokens
            if len(sequence.block_table) * self.cache.block_size < total and not self._make_room(sequence):
                break
            rows.append(Work(sequence, total - 1, 1, True))
            context += total
        decodes = len(rows)
        budget = self.limits.max_batched_tokens - decodes
        for sequence in prefilling:
            if budget == 0:
                break
            budget -= self._prefill(rows, sequence, budget)
        if self.waiting:
            budget = self._admit(rows, prefilling, budget)
        batch = Batch(rows, decodes, context, self.limits.max_batched_tokens - decodes - budget)
        if rows:
            self._in_flight = batch
        return batch

    def commit(
        self, batch: Batch, sampled: abc.Mapping[str, int] | abc.Sequence[int] | None = None
    ) -> list[Sequence]:
        """The step is done: advance, publish full blocks, append tokens; return who reached max_tokens.

        ``sampled``: request id to token, or one token per row with ``samples``, in order; None for
        sequences made from block ids. Other stop conditions are the engine's, which calls ``finish``.
        Raises RuntimeError when ``batch`` is not the one in flight, and ValueError when ``sampled`` does not
        fit it (see ``sampled_tokens``); then nothing has changed and the batch is still in flight.
        """
        self._require_in_flight(batch)
        tokens = sampled_tokens(batch, sampled)
        self._in_flight = None
        finished: list[Sequence] = []
        for work in batch.rows:
            sequence = work.sequence
            if sequence.status is not Status.RUNNING:
                continue
            sequence.computed_tokens = work.start + work.count
            if sequence.computed_tokens >= sequence.publish_at:
                self.cache.publish(sequence)
            if not work.samples:
                continue
            if sequence.id_block_size is None:
                sequence.token_ids.append(tokens[sequence.request_id])
            sequence.prefilling = False
            sequence.output_tokens += 1
            if sequence.output_tokens >= sequence.max_tokens:
                finished.append(sequence)
        # After everybody published, as advance_decodes does it too.
        for sequence in finished:
            self.finish(sequence, "length")
        return finished

    def discard(self, batch: Batch) -> None:
        """The step failed: nothing it computed counts, its rows will be scheduled again.

        With a cache whose steps cannot be repeated, they are preempted: they start again from what is cached.
        """
        self._require_in_flight(batch)
        self._in_flight = None
        if not self.cache.repeatable:
            for row in batch.rows:
                if row.sequence.status is Status.RUNNING:
                    self._preempt(row.sequence)

    # Many decode steps at once, for the simulator

    def steps_until_change(self) -> int:
        """How many steps can run with the same decode rows and nothing else; 0: call ``schedule``.

        In the last of them sequences may finish; before it nobody finishes, wants a block that is not free,
        is admitted, or prefills. A lower bound: it is less than the truth when a block that will be
        published on the way might let somebody in. O(running).
        """
        self._require_no_batch()
        running = self.running
        if not running or any(sequence.prefilling for sequence in running):
            return 0
        steps = min(sequence.max_tokens - sequence.output_tokens for sequence in running)
        if self.waiting and len(running) < min(self.limits.max_running, self.limits.max_batched_tokens):
            # Nobody prefills, so nobody is deferred, and the first in line alone decides.
            if self.limits.longest_prefix_first:
                return 0  # who is first may change whenever a block is taken
            first = self.waiting[0]
            if self.cache.fits(first, self.cache.match(first), self.limits.spare_blocks):
                return 0
            steps = steps_until_publication(running, steps)
        return steps_that_fit(running, self.cache, steps)

    def decode_batch(self, ahead: int = 0) -> Batch:
        """Totals, without rows, of the decode-only step ``ahead`` steps after the next one. O(running)."""
        count = len(self.running)
        context = sum(sequence.prompt_tokens + sequence.output_tokens for sequence in self.running)
        return Batch((), count, context + ahead * count, 0)

    def advance_decodes(self, steps: int) -> list[Sequence]:
        """Do ``steps`` decode steps at once, at most ``steps_until_change()``, as schedule and commit would.

        For sequences made from block ids (others need their sampled tokens: ValueError). Returns who
        finished in the last of them. O(running + blocks taken), whatever ``steps`` is.
        """
        self._require_no_batch()
        for sequence in self.running:
            if sequence.id_block_size is None:
                raise ValueError(f"request {sequence.request_id} has token ids: its steps must be run")
            if sequence.prefilling or sequence.output_tokens + steps > sequence.max_tokens:
                raise ValueError(f"{steps} decode steps are too many for {sequence}: ask steps_until_change")
        for _, publishes, row, block in changes(self.running, self.cache, steps):
            sequence = self.running[row]
            if publishes:
                sequence.computed_tokens = (block + 1) * self.cache.block_size
                self.cache.publish(sequence)
            else:
                self.cache.take_block(sequence)
        finished = []
        for sequence in self.running:
            sequence.output_tokens += steps
            sequence.computed_tokens = sequence.total_tokens - 1
            if sequence.output_tokens >= sequence.max_tokens:
                finished.append(sequence)
        for sequence in finished:
            self.finish(sequence, "length")
        return finished

    # Reports

    def load(self) -> LoadReport:
        """Gauges and counters as the contract wants them."""
        cache = self.cache
        return LoadReport(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=1.0 - cache.free_blocks / cache.blocks,
            prefix_queried_tokens=cache.counters.queried_tokens,
            prefix_hit_tokens=cache.counters.hit_tokens,
            capacity_tokens=cache.blocks * cache.block_size,
            block_size=cache.block_size,
        )

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, in order."""
        return self.cache.take_events()

    def reset_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes; False, changing nothing, while sequences run or loads are in flight.

        With ``preempt_running`` sequences are preempted first (they keep their output and recompute), and
        rows in flight are dropped.
        """
        if self.loads or (self.running and not preempt_running):
            return False
        if self.hot is not None:
            self.hot.clear()
        while self.running:
            self._preempt(self.running[-1])
        return self.cache.reset()

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues, tables and cache agree. O(everything); for tests."""
        holders = [*self.running, *self.loads.holders]
        if self.hot is not None:
            self.hot.check_invariants()
            holders += self.hot.holders
        self.cache.check_invariants(holders)
        assert len(self.running) <= self.limits.max_running
        for queue in (self.running, self.waiting):
            assert [s.precedence for s in queue] == sorted(s.precedence for s in queue)
        assert {s.request_id: s for s in self.running + self.waiting} == self._sequences
        for sequence in self.running:
            assert sequence.status is Status.RUNNING, sequence
            assert sequence.prefilling or sequence.computed_tokens == sequence.total_tokens - 1, sequence
            assert sequence.output_tokens < sequence.max_tokens, sequence
        for sequence in self.waiting:
            assert sequence.status in (Status.WAITING, Status.PREEMPTED), sequence
            assert not sequence.block_table and not sequence.computed_tokens, sequence

    # Inside

    def _admit(self, rows: list[Work], prefilling: list[Sequence], budget: int) -> int:
        """Start waiting sequences while slots, blocks and tokens last; what is left of the budget.

        Who cannot have its blocks stops the line, so that a large request is not overtaken for ever. Who
        waits for a prefix that is being computed lets others pass.
        """
        place = 0
        running, waiting, limits = self.running, self.waiting, self.limits
        line = waiting
        shares = limits.shares_prefills and self.cache.enabled
        if limits.longest_prefix_first and len(running) < limits.max_running:
            line = longest_prefix_first(waiting, self.cache, limits.max_overtaken)
        while budget > 0 and len(running) < limits.max_running and place < len(line):
            sequence = line[place]
            matched = self.cache.match(sequence)
            if shares and defer(sequence, len(matched), prefilling, self.cache):
                place += 1
                continue
            if not self.cache.adopt(sequence, matched, limits.spare_blocks if running else 0):
                if not running and self.hot is not None and self.hot.give_way():
                    continue
                break
            del line[place]
            if line is not waiting:
                self._remove(waiting, sequence)
                if count_overtaken(waiting, sequence, line[:place], limits.max_overtaken):
                    line, place = longest_prefix_first(waiting, self.cache, limits.max_overtaken), 0
            if self.hot is not None:
                self.hot.admitted(sequence)
            self._admissions += 1
            sequence.admission = self._admissions
            sequence.status = Status.RUNNING
            sequence.prefilling = True
            insort(running, sequence, key=_precedence)
            prefilling.append(sequence)
            budget -= self._prefill(rows, sequence, budget)
        return budget

    def _prefill(self, rows: list[Work], sequence: Sequence, budget: int) -> int:
        """Add a row for the next chunk of a prefill; its tokens."""
        start, total = sequence.computed_tokens, sequence.total_tokens
        most = min(budget, self.limits.max_chunk_tokens or budget)
        stop = self.cache.chunk_stop(sequence, min(start + most, total))
        rows.append(Work(sequence, start, stop - start, stop == total))
        return stop - start

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for a decode, preempting from the end of the line; False when it was preempted itself."""
        while not self.cache.extend(sequence):
            if self.hot is not None and self.hot.give_way():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(self.running, sequence)
        self.cache.release(sequence)
        sequence.status = Status.PREEMPTED
        sequence.prefilling = False
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_precedence)

    def _remove(self, queue: list[Sequence], sequence: Sequence) -> None:
        at = bisect_left(queue, sequence.precedence, key=_precedence)
        assert queue[at] is sequence
        del queue[at]

    def _require_no_batch(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("a batch is in flight: commit or discard it first")

    def _require_in_flight(self, batch: Batch) -> None:
        if batch is not self._in_flight and (batch.rows or self._in_flight is not None):
            raise RuntimeError("this batch is not the one in flight: commit each batch once, as scheduled")
