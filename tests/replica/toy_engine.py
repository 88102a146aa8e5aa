"""An engine with a KV memory that remembers who wrote what, so that one wrong block is noticed at once."""

from collections import Counter
from hashlib import sha256
from typing import Any

from replica.batch import Batch
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.state_checkpoints import CopyState, ZeroState
from replica.prefix_load import PrefixLoad
from replica.scheduler import Scheduler
from replica.sequence import Sequence

VOCABULARY = 7


def prefix_name(sequence: Sequence, tokens: int) -> bytes:
    """What KV at position ``tokens - 1`` depends on: tokens and images up to there, salt and adapter."""
    images = [(item.identifier, item.offset) for item in sequence.multimodal if item.offset < tokens]
    return repr((sequence.salt, sequence.adapter, sequence.token_ids[:tokens], images)).encode()


def next_token(sequence: Sequence, tokens: int) -> int:
    """The toy's greedy token after the first ``tokens`` tokens."""
    return sha256(prefix_name(sequence, tokens)).digest()[0] % VOCABULARY


def expected_output(prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """What a fresh engine without cache, batching or preemption would generate."""
    sequence = Sequence("expected", prompt, max_tokens, **options)
    for _ in range(max_tokens):
        sequence.token_ids.append(next_token(sequence, len(sequence.token_ids)))
    return sequence.token_ids[len(prompt) :]


class ToyEngine:
    """Runs a scheduler's batches and checks every read and every row."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[tuple[int, int], bytes] = {}
        self.computed_positions = 0
        self.states: dict[int, bytes] = {}
        """What each state slot has seen, if the cache keeps recurrent states."""

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        size = self.scheduler.cache.block_size
        return sequence.block_table[position // size], position % size

    def check(self, batch: Batch) -> None:
        """Rows respect the limits, start where the KV ends, and read only KV of their own prefix."""
        limits = self.scheduler.limits
        assert batch.tokens <= limits.max_batched_tokens
        assert batch.tokens == sum(row.count for row in batch.rows)
        assert len({row.sequence.request_id for row in batch.rows}) == len(batch.rows)
        assert batch.decode_context_tokens == sum(row.start + 1 for row in batch.decodes)
        assert all(row.count == 1 and row.samples for row in batch.decodes)
        written: set[tuple[int, int]] = set()
        for row in batch.rows:
            sequence = row.sequence
            assert row.count >= 1 and row.start == sequence.computed_tokens
            assert row.samples == (row.start + row.count == sequence.total_tokens)
            for position in range(row.start):
                assert self.memory.get(self.slot(sequence, position)) == prefix_name(sequence, position + 1)
            slots = {self.slot(sequence, position) for position in range(row.start, row.start + row.count)}
            assert not slots & written, "two rows write one place"
            written |= slots
        # A place that is written now is in one table, and not in the part that others can hit.
        holders = Counter(block for sequence in self.scheduler.running for block in sequence.block_table)
        for row in batch.rows:
            size = self.scheduler.cache.block_size
            assert row.start >= row.sequence.published_blocks * size
            for block in row.sequence.block_table[
                row.start // size : (row.start + row.count - 1) // size + 1
            ]:
                assert holders[block] == 1

    def compute(self, batch: Batch) -> dict[str, int]:
        """Write the rows' KV; the sampled token of every row that samples."""
        sampled = {}
        self.run_states(batch)
        for row in batch.rows:
            for position in range(row.start, row.start + row.count):
                self.memory[self.slot(row.sequence, position)] = prefix_name(row.sequence, position + 1)
                self.computed_positions += 1
            if row.samples:
                sampled[row.sequence.request_id] = next_token(row.sequence, row.start + row.count)
        return sampled

    def run_states(self, batch: Batch) -> None:
        """Carry out what was ordered, then advance the live state of every row and report it."""
        cache = self.scheduler.cache
        if not isinstance(cache, HybridCache):
            return
        for order in cache.states.take_orders():
            match order:
                case ZeroState():
                    self.states[order.slot] = b""
                case CopyState():
                    self.states[order.target] = self.states[order.source]
        slots = set()
        for row in batch.rows:
            slot = cache.states.slot(row.sequence)
            seen = prefix_name(row.sequence, row.start) if row.start else b""
            assert self.states[slot] == seen, "a row starts from another prefix's state"
            self.states[slot] = prefix_name(row.sequence, row.start + row.count)
            cache.states.ran(row.sequence, row.start, row.start + row.count)
            slots.add(slot)
        assert len(slots) == len(batch.rows), "two rows share a state"

    def fill(self, load: PrefixLoad, tokens: int) -> None:
        """A mover wrote the positions up to ``tokens`` that had not arrived before."""
        size = self.scheduler.cache.block_size
        for position in range(load.loader.computed_tokens, tokens):
            slot = load.blocks[position // size - load.start // size], position % size
            self.memory[slot] = prefix_name(load.loader, position + 1)

    def step(self) -> list[Sequence]:
        """Schedule, check, compute, commit; who finished."""
        batch = self.scheduler.schedule()
        assert batch.empty != self.scheduler.has_work, "work waits, but nothing runs"
        self.check(batch)
        finished = self.scheduler.commit(batch, self.compute(batch))
        self.scheduler.check_invariants()
        return finished

    def drain(self, limit: int = 5_000) -> list[Sequence]:
        """Step until nothing is left; who finished, in order."""
        finished: list[Sequence] = []
        for _ in range(limit):
            if not self.scheduler.has_work:
                return finished
            finished += self.step()
        raise AssertionError(
            f"work left after {limit} steps: {self.scheduler.running + self.scheduler.waiting}"
        )
