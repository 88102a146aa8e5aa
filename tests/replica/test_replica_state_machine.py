"""Random lives of a small replica against a naive model: right KV, right tokens, no leak, always progress.

The model knows no blocks: a request's output is what a fresh engine without a cache would generate. The toy
engine's memory remembers which prefix wrote each place, so reading another's KV fails in the step it happens.
"""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from replica.contract.multimodal import MultimodalItem
from replica.hot_prefixes import HotPrefixes
from replica.scheduler import RequestTooLong, Scheduler, SchedulerLimits
from replica.sequence import Sequence, Status
from tests.replica.caches import HYBRIDS, MAKERS
from tests.replica.toy_engine import ToyEngine, expected_output


def one_bit_hash(parent: bytes, raw: bytes) -> bytes:
    return bytes([raw_block_hash(parent, raw)[0] & 1])


class ReplicaLife(RuleBasedStateMachine):
    """Requests come, run, are aborted, preempted and finished, in a pool far too small for them."""

    @initialize(
        kind=st.sampled_from(["blocks", "blocks", "radix lru", *MAKERS, *HYBRIDS]),
        tokens=st.sampled_from([6, 12, 20, 20, 28, 40, 56]),
        block_size=st.sampled_from([1, 2, 4]),
        max_running=st.integers(1, 4),
        more_tokens=st.integers(0, 8),
        spare_blocks=st.integers(0, 2),
        enabled=st.sampled_from([True, True, True, False]),
        colliding=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "max_chunk_tokens": st.sampled_from([None, None, 1, 3]),
                "longest_prefix_first": st.booleans(),
                "max_overtaken": st.integers(0, 3),
                "pinned_blocks": st.sampled_from([0, 0, 3, 8]),
            }
        ),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        kind,
        tokens,
        block_size,
        max_running,
        more_tokens,
        spare_blocks,
        enabled,
        colliding,
        options,
        seed,
    ):
        blocks = max(2, tokens // block_size)
        self.seed = seed
        cache = (MAKERS | HYBRIDS)[kind](
            blocks,
            block_size,
            enabled=enabled,
            record_events=True,
            raw_hash=one_bit_hash if colliding else raw_block_hash,
        )
        limits = SchedulerLimits(max_running, max_running + more_tokens, 40, spare_blocks, **options)
        self.scheduler = Scheduler(cache, limits)
        if self.scheduler.hot is not None:  # hot sooner than in earnest
            self.scheduler.hot = HotPrefixes(cache, options["pinned_blocks"], hot_after=1)
        self.loads = []
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
        image=st.sampled_from([None, None, "cat", "dog"]),
        image_at=st.integers(0, 9),
        reads_cache=st.sampled_from([True, True, True, False]),
        copies=st.integers(1, 3),
    )
    def request(
        self,
        common,
        which,
        own,
        max_tokens,
        priority,
        salt,
        adapter,
        image,
        image_at,
        reads_cache,
        copies,
    ):
        prompt = [which, *[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2][:common], *own]
        shown = image is not None and image_at + 3 <= len(prompt)
        images = (MultimodalItem(image, image_at, 3),) if shown else ()
        options = {"salt": salt, "adapter": adapter, "multimodal": images}
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
        self.abort_one(data.draw(st.sampled_from(sorted(self.live))))

    def abort_one(self, name):
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

    @precondition(lambda self: self.live and self.in_flight is None)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def begin_load(self, data, tokens):
        self.load_for(self.live[data.draw(st.sampled_from(sorted(self.live)))], tokens)

    def load_for(self, sequence, tokens):
        size = self.scheduler.cache.block_size
        load = self.scheduler.loads.begin(sequence, min(tokens, sequence.total_tokens) // size * size)
        if load is not None:
            assert len(load.blocks) * size == load.stop - load.start > 0
            self.loads.append(load)

    @precondition(lambda self: self.loads and self.in_flight is None)
    @rule(data=st.data(), share=st.floats(0, 1))
    def load_arrived(self, data, share):
        self.arrive(data.draw(st.sampled_from(self.loads)), share)

    def arrive(self, load, share):
        size = self.scheduler.cache.block_size
        done = load.loader.computed_tokens
        tokens = done + int((load.stop - done) * share) // size * size
        self.toy.fill(load, tokens)
        self.scheduler.loads.arrived(load, tokens)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def load_over(self, data):
        self.end_load(self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1))))

    def end_load(self, load):
        self.scheduler.loads.end(load)
        self.scheduler.loads.end(load)

    @rule()
    def reset(self):
        nothing_held = not self.scheduler.running and not self.loads
        assert self.scheduler.reset_cache() is nothing_held

    @rule()
    def reset_everything(self):
        assert self.scheduler.reset_cache(preempt_running=True) is not bool(self.loads)
        assert self.loads or not self.scheduler.running

    # What the engine does

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self):
        batch = self.scheduler.schedule()
        assert batch.empty is not self.scheduler.has_work or self.loads, "work waits, but nothing runs"
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

    @precondition(lambda self: self.in_flight is None)
    @rule(seed=st.integers(0, 2**32), stem=st.sampled_from([6, 12, 12]), rounds=st.integers(5, 20))
    def a_busy_while(self, seed, stem, rounds):
        """Many requests over few prefixes, with everything that happens to them, so that memory is full."""
        rng = random.Random(seed)
        for _ in range(rounds):
            own = [rng.randrange(3) for _ in range(rng.randrange(4))]
            salt = rng.choice([None, None, None, None, "x"])
            image, priority = rng.choice([None, None, "cat", "dog"]), rng.choice([0, 0, 1])
            at = rng.randrange(4)
            self.request(stem, 0, own, rng.randrange(1, 12), priority, salt, None, image, at, True, 1)
            for _ in range(rng.randrange(1, 4)):
                self.schedule()
                if rng.random() < 0.05 and self.live:
                    self.abort_one(rng.choice(sorted(self.live)))
                if rng.random() < 0.05:
                    self.discard()
                else:
                    self.commit()
                self.sound()
                self.events_rebuild_what_is_cached()
            if rng.random() < 0.1 and self.live:
                self.load_for(self.live[rng.choice(sorted(self.live))], rng.randrange(1, 20))
            if rng.random() < 0.3 and self.loads:
                self.arrive(rng.choice(self.loads), rng.random())
                self.end_load(self.loads.pop(rng.randrange(len(self.loads))))
            if rng.random() < 0.02:
                self.reset_everything()

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
        hot = self.scheduler.hot.holders if self.scheduler.hot is not None else []
        holders = [*self.scheduler.running, *self.scheduler.loads.holders, *hot]
        held = {number for s in holders for number in s.block_table}
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
        self.a_busy_while(self.seed, 12, 12)  # also after whatever happened before
        for load in self.loads:
            self.scheduler.loads.end(load)
        self.loads = []
        for _ in range(2_000):
            if not self.scheduler.has_work:
                break
            self.schedule()
            self.commit()
        assert not self.live, "requests never finished"
        cache = self.scheduler.cache
        if self.scheduler.hot is not None:
            self.scheduler.hot.clear()
        assert cache.free_blocks == cache.blocks
        assert cache.stranded_tokens() == 0
        assert self.scheduler.reset_cache() is True
        self.scheduler.check_invariants()


TestReplicaLife = ReplicaLife.TestCase
TestReplicaLife.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
