"""Random lives of the tiers with a model that has the bytes: what is ordered can be done, and is right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.prefill_cost import PrefillCost
from replica.kv_cache.cache import Evicted
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.tier_settings import TierSettings
from replica.kv_cache.tier_transport import Drop, FetchResult, PeerOffer, Save, Spill, Transfer, Trouble
from replica.kv_cache.tiers import Tiers
from replica.kv_cache.write_budget import DAY_S

NAMES = [bytes([65 + number]) for number in range(12)]
BLOCK_BYTES = 1_000
DAILY = 60_000


class TierLife(RuleBasedStateMachine):
    """A mover that is slow, out of order and unreliable; it keeps what it wrote in dictionaries."""

    @initialize(
        host=st.integers(0, 5),
        disk=st.integers(0, 5),
        ahead=st.integers(0, 4),
        at_once=st.integers(1, 3),
        limited=st.booleans(),
        layers=st.sampled_from([1, 8]),
    )
    def start(self, host, disk, ahead, at_once, limited, layers):
        daily = DAILY if limited else None
        shape = TierSettings(16, BLOCK_BYTES, host, disk, daily, ahead, at_once, layers)
        self.tiers = Tiers(shape, PrefillCost(0.001, 1e-3), now=0.0)
        self.now = 0.0
        self.bytes: dict[Tier, dict[bytes, int]] = {Tier.HOST: {}, Tier.DISK: {}}
        """What can be read, with its checksum."""
        self.writing: list[Save | Spill] = []
        self.reading: list[tuple] = []
        self.disk_writes: list[float] = []
        self.told: dict[str, set] = {"CPU": set(), "STORAGE": set()}

    def carry_out(self, orders):
        for order in orders:
            match order:
                case Save():
                    assert order.block_hash not in self.bytes[order.target], "written over what is there"
                    self.begin_write(order, order.target)
                case Spill():
                    assert self.bytes[Tier.HOST][order.block_hash] == order.checksum
                    assert order.block_hash not in self.bytes[Tier.DISK]
                    self.begin_write(order, Tier.DISK)
                case Drop():
                    # Nobody copies it: neither to nor from.
                    assert (order.block_hash, order.tier) not in [self.target(o) for o in self.writing]
                    if order.tier is Tier.HOST:
                        assert order.block_hash not in [
                            o.block_hash for o in self.writing if isinstance(o, Spill)
                        ]
                    for fetch, _ in self.reading:
                        assert (order.block_hash, order.tier) not in zip(
                            fetch.block_hashes, fetch.plan.sources, strict=True
                        )
                    self.bytes[order.tier].pop(order.block_hash, None)

    def begin_write(self, order, tier):
        assert self.target(order) not in [self.target(other) for other in self.writing]
        self.writing.append(order)
        if tier is Tier.DISK:
            self.disk_writes.append(self.now)

    def target(self, order):
        return order.block_hash, Tier.DISK if isinstance(order, Spill) else order.target

    # The device

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    def evict(self, names):
        self.carry_out(self.tiers.evicted([Evicted(name, (0,)) for name in names], self.now))

    @rule()
    def spill(self):
        self.carry_out(self.tiers.spills(self.now))

    @rule(rounds=st.lists(st.lists(st.sampled_from(NAMES), min_size=2, max_size=6, unique=True), min_size=1))
    def a_busy_while(self, rounds):
        """Evictions, spills and writes that all work, so that the tiers are full and warm."""
        for names in rounds:
            self.evict(names)
            for _ in range(2):
                while self.writing:
                    self.end_write(self.writing.pop(0), True)
                self.spill()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def write_ends(self, data, works):
        self.end_write(self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1))), works)

    def end_write(self, order, works):
        name, tier = self.target(order)
        if works:
            self.bytes[tier][name] = name[0]
        if isinstance(order, Spill):
            done = (
                self.tiers.spilled(order, name[0], self.now)
                if works
                else self.tiers.not_spilled(order, self.now)
            )
        else:
            done = (
                self.tiers.saved(order, name[0], self.now) if works else self.tiers.not_saved(order, self.now)
            )
        self.carry_out(done)

    # Requests

    @rule(
        first=st.integers(0, 3),
        length=st.integers(0, 8),
        matched=st.integers(0, 3),
        offer=st.one_of(st.none(), st.integers(0, 10)),
        peer=st.sampled_from(["a", "b"]),
        wait_s=st.sampled_from([0.0, 1.0]),
    )
    def request(self, first, length, matched, offer, peer, wait_s):
        names = NAMES[first : first + length]
        matched = min(matched, len(names))
        asked = PeerOffer(peer, offer) if offer is not None else None
        prompt_tokens = 16 * len(names) + 1
        plan = self.tiers.plan(names, matched, prompt_tokens, self.now, peer=asked, wait_s=wait_s)
        assert plan.start_block == matched and plan.stop_block <= len(names)
        assert plan.seconds <= plan.recompute_s
        for name, tier in zip(names[matched:], plan.sources, strict=False):
            assert tier is Tier.PEER or name in self.bytes[tier], "planned to read what is not there"
        fetch = self.tiers.begin(plan, names, asked)
        assert (fetch is None) is (not plan.sources)
        if fetch is not None:
            for name, tier, checksum in zip(fetch.block_hashes, plan.sources, fetch.checksums, strict=True):
                assert checksum == (None if tier is Tier.PEER else self.bytes[tier][name])
            self.reading.append((fetch, names))

    @precondition(lambda self: self.reading)
    @rule(
        data=st.data(),
        trouble=st.sampled_from([None, None, *Trouble]),
        seconds=st.sampled_from([1e-5, 1e-3, 3.0]),
    )
    def read_ends(self, data, trouble, seconds):
        fetch, _ = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        sources = fetch.plan.sources
        arrived = len(sources) if trouble is None else data.draw(st.integers(0, len(sources) - 1))
        for name, tier in zip(fetch.block_hashes[:arrived], sources, strict=False):
            assert tier is Tier.PEER or self.bytes[tier][name] == name[0], "it was deleted while it was read"
        transfers = tuple(
            Transfer(tier, BLOCK_BYTES * sources[:arrived].count(tier), seconds)
            for tier in dict.fromkeys(sources[:arrived])
        )
        self.carry_out(self.tiers.ended(fetch, FetchResult(arrived, transfers, trouble), self.now))

    @rule(really=st.integers(0, 4))
    def forget_all(self, really):
        if really:
            return  # seldom: it empties everything
        self.carry_out(self.tiers.forget_all())
        assert not any(self.tiers.current(fetch) for fetch, _ in self.reading)
        assert self.tiers.plan(NAMES, 0, 500, self.now).within_reach == 0

    @rule(seconds=st.sampled_from([0.01, 0.9, 30.0, 3_000.0, 40_000.0]))
    def time_passes(self, seconds):
        self.now += seconds

    # What must hold

    @invariant()
    def sound(self):
        self.tiers.check_invariants()
        for tier, shelf in self.tiers.shelves.items():
            readable = {name for name in shelf.hashes if shelf.readable(name)}
            assert readable <= set(self.bytes[tier]), "believes bytes that are not there"
            coming = [name for name, where in map(self.target, self.writing) if where is tier]
            assert len(self.bytes[tier]) + len(coming) <= shelf.capacity, "more bytes than there is room for"
            assert set(self.bytes[tier]) | set(coming) == set(shelf.hashes), "bytes nobody knows of"

    @invariant()
    def disk_writes_keep_to_the_budget(self):
        if self.tiers.budget.limited and self.disk_writes:
            recent = [at for at in self.disk_writes if at > self.now - DAY_S]
            assert len(recent) * BLOCK_BYTES <= DAILY

    @invariant()
    def events_tell_what_is_readable(self):
        for event in self.tiers.take_events():
            names = set(event.block_hashes)
            match event:
                case BlocksStored():
                    assert not names & self.told[event.medium]
                    self.told[event.medium] |= names
                case BlocksRemoved():
                    assert names <= self.told[event.medium]
                    self.told[event.medium] -= names
        for tier, shelf in self.tiers.shelves.items():
            assert self.told[tier.value] == {name for name in shelf.hashes if shelf.readable(name)}

    def teardown(self):
        if not hasattr(self, "tiers"):
            return
        for order in self.writing:
            name, tier = self.target(order)
            self.bytes[tier][name] = name[0]
        writing, self.writing = self.writing, []
        for order in writing:
            end = self.tiers.spilled if isinstance(order, Spill) else self.tiers.saved
            self.carry_out(end(order, order.block_hash[0], self.now))
        for fetch, _ in list(self.reading):
            self.reading.remove((fetch, _))
            self.carry_out(self.tiers.ended(fetch, FetchResult(0, (), Trouble.ABORTED), self.now))
        self.carry_out(self.tiers.forget_all())
        assert self.bytes == {Tier.HOST: {}, Tier.DISK: {}}, "bytes left behind"


TestTierLife = TierLife.TestCase
TestTierLife.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
