"""Random lives of a small replica against a naive model: right KV, right tokens, no leak, always progress.

The model knows no blocks: a request's output is what a fresh engine without a cache would generate. The toy
engine's memory remembers which prefix wrote each place, so reading another's KV fails in the step it happens.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from replica.scheduler import RequestTooLong, Scheduler, SchedulerLimits
from replica.sequence import Sequence, Status
from tests.replica.caches import MAKERS
from tests.replica.toy_engine import ToyEngine, expected_output


def one_bit_hash(parent: bytes, raw: bytes) -> bytes:
    return bytes([raw_block_hash(parent, raw)[0] & 1])


class ReplicaLife(RuleBasedStateMachine):
    """Requests come, run, are aborted, preempted and finished, in a pool far too small for them."""

    @initialize(
        kind=st.sampled_from(sorted(MAKERS)),
        blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 4),
        more_tokens=st.integers(0, 8),
        spare_blocks=st.integers(0, 2),
        enabled=st.sampled_from([True, True, True, False]),
        colliding=st.booleans(),
    )
    def start(self, kind, blocks, block_size, max_running, more_tokens, spare_blocks, enabled, colliding):
        cache = MAKERS[kind](
            blocks,
            block_size,
            enabled=enabled,
            record_events=True,
            raw_hash=one_bit_hash if colliding else raw_block_hash,
        )
        limits = SchedulerLimits(max_running, max_running + more_tokens, 40, spare_blocks)
        self.scheduler = Scheduler(cache, limits)
        self.toy = ToyEngine(self.scheduler)
        self.colliding = colliding
        self.in_flight = None
        self.live: dict[str, Sequence] = {}
        self.count = 0
        self.told: set[bytes | int] = set()

    # What clients do

    @rule(
        common=st.integers(0, 12),
        which=st.integers(0, 1),
        own=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([None, None, "x", "y"]),
        adapter=st.sampled_from([None, None, None, "x"]),
        reads_cache=st.sampled_from([True, True, True, False]),
        copies=st.integers(1, 3),
    )
    def request(self, common, which, own, max_tokens, priority, salt, adapter, reads_cache, copies):
        prompt = [which, *[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2][:common], *own]
        options = {"salt": salt, "adapter": adapter}
        for _ in range(copies):
            self.count += 1
            sequence = Sequence(
                f"r{self.count}", prompt, max_tokens, priority=priority, reads_cache=reads_cache, **options
            )
            cache = self.scheduler.cache
            fits = cache.blocks_for(len(prompt) + max_tokens - 1) <= cache.blocks
            try:
                self.scheduler.add(sequence)
            except RequestTooLong:
                assert not fits
                continue
            assert fits
            sequence.parameters = expected_output(prompt, max_tokens, **options)
            self.live[sequence.request_id] = sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        sequence = self.live.pop(name)
        assert self.scheduler.abort(name) is sequence and sequence.finish_reason == "abort"
        assert self.scheduler.abort(name) is None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop(self, data):
        """The engine found a stop string."""
        sequence = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.scheduler.finish(sequence, "stop")
        self.check_output(sequence)

    @rule()
    def reset(self):
        nothing_held = not self.scheduler.running
        assert self.scheduler.reset_cache() is nothing_held

    @rule()
    def reset_everything(self):
        assert self.scheduler.reset_cache(preempt_running=True) is True
        assert not self.scheduler.running

    # What the engine does

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self):
        batch = self.scheduler.schedule()
        assert batch.empty is not self.scheduler.has_work, "work waits, but nothing runs"
        self.toy.check(batch)
        self.sampled = self.toy.compute(batch)
        self.in_flight = batch

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def commit(self):
        for sequence in self.scheduler.commit(self.in_flight, self.sampled):
            assert self.live.pop(sequence.request_id) is sequence
            assert sequence.finish_reason == "length" and sequence.output_tokens == sequence.max_tokens
            self.check_output(sequence)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def discard(self):
        self.scheduler.discard(self.in_flight)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is None)
    @rule(steps=st.integers(2, 12))
    def several_steps(self, steps):
        for _ in range(steps):
            self.schedule()
            self.commit()

    # What must hold

    def check_output(self, sequence):
        assert sequence.output_ids == sequence.parameters[: sequence.output_tokens]
        assert sequence.block_table == [] and sequence.status is Status.FINISHED
        assert 0 <= sequence.cached_tokens < sequence.prompt_tokens

    @invariant()
    def sound(self):
        self.scheduler.check_invariants()
        for sequence in self.live.values():
            assert sequence.output_ids == sequence.parameters[: sequence.output_tokens]
        held = {number for s in self.scheduler.running for number in s.block_table}
        cache = self.scheduler.cache
        assert cache.free_blocks == cache.blocks - len(held)
        load = self.scheduler.load()
        assert (load.running or 0) + (load.waiting or 0) == len(self.live)

    @invariant()
    def events_rebuild_what_is_cached(self):
        for event in self.scheduler.take_events():
            match event:
                case BlocksStored():
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    assert self.colliding or event.parent_hash is None or event.parent_hash in self.told
                    assert not self.told & set(event.block_hashes)
                    self.told |= set(event.block_hashes)
                case BlocksRemoved():
                    assert self.told >= set(event.block_hashes)
                    self.told -= set(event.block_hashes)
                case CacheCleared():
                    self.told.clear()
        assert self.told == set(self.scheduler.cache.cached_hashes())

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.commit()
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.schedule()
            self.commit()
        assert not self.live, "requests never finished"
        cache = self.scheduler.cache
        assert cache.free_blocks == cache.blocks
        assert cache.stranded_tokens() == 0
        assert self.scheduler.reset_cache() is True
        self.scheduler.check_invariants()


TestReplicaLife = ReplicaLife.TestCase
TestReplicaLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
