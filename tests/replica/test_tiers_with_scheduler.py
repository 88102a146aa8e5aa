"""Scheduler, cache and tiers together: evicted KV comes back from the host, and every token stays right."""

import random

import pytest

from replica.contract.prefill_cost import PrefillCost
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.tier_settings import TierSettings
from replica.kv_cache.tier_transport import Drop, FetchResult, PeerOffer, Save, Spill, Trouble
from replica.kv_cache.tiers import Tiers
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from tests.replica.caches import CACHES, PAGE
from tests.replica.toy_engine import ToyEngine, expected_output


class TieredToy:
    """A toy engine with a mover that copies at once, now and then wrongly, or not at all."""

    def __init__(self, cache, host, disk, rng=None):
        limits = SchedulerLimits(4, 24, 128, max_chunk_tokens=10)
        self.toy = ToyEngine(Scheduler(cache, limits))
        shape = TierSettings(PAGE, 100, host, disk, spill_ahead=host // 2)
        self.tiers = Tiers(shape, PrefillCost(0.001, 1e-3), now=0.0)
        self.store: dict[tuple[Tier, bytes], list[bytes]] = {}
        self.rng = rng
        self.now = 0.0

    def slots(self, blocks):
        size = self.toy.scheduler.cache.block_size
        return [(block, offset) for block in blocks for offset in range(size)]

    def carry_out(self, orders):
        for order in orders:
            match order:
                case Save():
                    if self.fails():
                        self.carry_out(self.tiers.not_saved(order, self.now))
                        continue
                    kv = [self.toy.memory[slot] for slot in self.slots(order.blocks)]
                    self.store[order.target, order.block_hash] = kv
                    self.carry_out(self.tiers.saved(order, 1, self.now))
                case Spill():
                    self.store[Tier.DISK, order.block_hash] = self.store[Tier.HOST, order.block_hash]
                    self.carry_out(self.tiers.spilled(order, order.checksum, self.now))
                case Drop():
                    self.store.pop((order.tier, order.block_hash), None)

    def fails(self):
        return self.rng is not None and self.rng.random() < 0.1

    def add(self, sequence, peer=None, peer_store=None):
        """What an engine does at arrival: look, plan, load, add."""
        cache, loads = self.toy.scheduler.cache, self.toy.scheduler.loads
        hashes = cache.block_hashes(sequence)
        matched = len(cache.match(sequence)) * cache.block_size // cache.hash_tokens
        plan = self.tiers.plan(hashes, matched, sequence.prompt_tokens, self.now, peer=peer)
        # The sources are kept first: room for the load may evict, and what is evicted needs room on the host.
        fetch = self.tiers.begin(plan, hashes, peer)
        load = loads.begin(sequence, plan.stop_block * cache.hash_tokens) if fetch is not None else None
        self.save_evicted()
        if fetch is not None and load is None:
            self.carry_out(self.tiers.ended(fetch, FetchResult(0, (), Trouble.ABORTED), self.now))
        elif fetch is not None:
            arrived = self.copy(fetch, load, peer_store)
            if self.tiers.current(fetch):
                loads.arrived(load, max(load.start, (plan.start_block + arrived) * cache.hash_tokens))
            self.toy.scheduler.check_invariants()
            trouble = None if arrived == len(plan.sources) else Trouble.CORRUPT
            self.carry_out(self.tiers.ended(fetch, FetchResult(arrived, (), trouble), self.now))
            loads.end(load)
        self.tiers.check_invariants()
        self.toy.scheduler.add(sequence)

    def copy(self, fetch, load, peer_store):
        """Blocks that arrived before the first corrupt one."""
        cache = self.toy.scheduler.cache
        for place, (block_hash, tier) in enumerate(
            zip(fetch.block_hashes, fetch.plan.sources, strict=True), fetch.plan.start_block
        ):
            if self.fails():
                return place - fetch.plan.start_block
            source = peer_store if tier is Tier.PEER else self.store
            kv = source[tier if tier is not Tier.PEER else Tier.HOST, block_hash]
            for offset, name in enumerate(kv):
                position = place * cache.hash_tokens + offset
                if position >= load.start:  # finer pages may hold the first tokens of a block already
                    slot = load.blocks[(position - load.start) // cache.block_size]
                    self.toy.memory[slot, position % cache.block_size] = name
        return len(fetch.block_hashes)

    def save_evicted(self):
        self.carry_out(self.tiers.evicted(self.toy.scheduler.cache.take_evictions(), self.now))
        self.carry_out(self.tiers.spills(self.now))

    def step(self):
        self.now += 1.0
        batch = self.toy.scheduler.schedule()
        self.save_evicted()  # before anything is written
        self.toy.check(batch)
        finished = self.toy.scheduler.commit(batch, self.toy.compute(batch))
        self.toy.scheduler.check_invariants()
        return finished

    def drain(self):
        while self.toy.scheduler.has_work:
            self.step()


@pytest.fixture(params=CACHES)
def make(request):
    return lambda tokens: CACHES[request.param](tokens, record_evictions=True)


def test_what_was_evicted_comes_back_from_the_host(make):
    toy = TieredToy(make(64), host=32, disk=0)
    prompts = [[number] * 40 for number in range(3)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            sequence = Sequence(f"{turn}.{number}", [*prompt, turn], 2)
            toy.add(sequence)
            toy.drain()
            assert sequence.output_ids == expected_output([*prompt, turn], 2)
            if turn:
                assert sequence.cached_tokens >= 40 // PAGE * PAGE - PAGE
    assert toy.tiers.counters.fetched[Tier.HOST] > 0


def test_a_prefill_pool_hands_its_work_to_a_decode_pool(make):
    prefill, decode = TieredToy(make(64), host=32, disk=0), TieredToy(make(64), host=0, disk=0)
    prompt = list(range(41))
    prefill.add(Sequence("p", prompt, 1))
    prefill.drain()
    for number in range(2):  # its blocks leave the device for the host, from where it serves them
        prefill.add(Sequence(f"{number}", [90 + number] * 60, 1))
        prefill.drain()
    sequence = Sequence("d", prompt, 5)
    names = prefill.toy.scheduler.cache.block_hashes(Sequence("same", prompt, 1))
    held = sum(1 for name in names if (Tier.HOST, name) in prefill.store)
    decode.add(sequence, PeerOffer("prefill-1", held), prefill.store)
    decode.drain()
    assert held == 10 and sequence.cached_tokens == 40
    assert sequence.output_ids == expected_output(prompt, 5)


@pytest.mark.parametrize(
    ("seed", "host", "disk"), [(0, 24, 0), (1, 6, 40), (2, 0, 30), (3, 3, 3), (4, 200, 0)]
)
def test_random_traffic_over_tiers_gives_the_tokens_of_a_fresh_engine(make, seed, host, disk):
    rng = random.Random(seed)
    toy = TieredToy(make(96), host, disk, rng)
    requests = []
    for number in range(250):
        toy.now += 10.0
        stem = [rng.randrange(4)] * rng.choice([0, 8, 17, 32])
        prompt = [*stem, *[rng.randrange(3) for _ in range(rng.randrange(1, 20))]]
        options = {"salt": rng.choice([None, None, "x"])}
        sequence = Sequence(f"{number}", prompt, rng.randrange(1, 6), **options)
        toy.add(sequence)
        requests.append((sequence, prompt, options))
        if rng.random() < 0.1:
            toy.toy.scheduler.abort(f"{rng.randrange(number + 1)}")
        if rng.random() < 0.02:
            toy.carry_out(toy.tiers.forget_all())
        for _ in range(rng.randrange(4)):
            if toy.toy.scheduler.has_work:
                toy.step()
    toy.drain()
    for sequence, prompt, options in requests:
        expected = expected_output(prompt, sequence.max_tokens, **options)
        assert sequence.output_ids == expected[: sequence.output_tokens]
        assert sequence.output_tokens == sequence.max_tokens or sequence.finish_reason == "abort"
    cache = toy.toy.scheduler.cache
    assert cache.free_blocks == cache.blocks and cache.stranded_tokens() == 0
    fetched = sum(toy.tiers.counters.fetched.values())
    assert fetched > (20 if host + disk > 10 else 0), "nothing came back: the test shows nothing"
    assert toy.tiers.counters.corrupt > 0
