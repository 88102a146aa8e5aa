"""Tiers: what is saved, spilled, dropped, fetched; what happens when a tier is full, slow, wrong or gone."""

import doctest

import pytest

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.prefill_cost import PrefillCost
from replica.kv_cache import tiers as module
from replica.kv_cache.cache import Evicted
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.tier_settings import TierSettings
from replica.kv_cache.tier_transport import Drop, FetchResult, PeerOffer, Save, Spill, Transfer, Trouble
from replica.kv_cache.tiers import MOST_PEERS, Tiers

COST = PrefillCost(fixed_s=0.001, per_token_s=1e-3)
"""Slow enough that every tier is worth a fetch."""
CHAIN = [b"0", b"1", b"2", b"3", b"4", b"5"]


def make(host=4, disk=4, **options):
    settings = {"block_tokens": 16, "block_bytes": 1_000, "host_blocks": host, "disk_blocks": disk, **options}
    return Tiers(TierSettings(**settings), COST, now=0.0)


def evict(tiers, names, now=0.0):
    """The device evicts these, last first, as it would; every save succeeds at once."""
    orders = tiers.evicted([Evicted(name, (place,)) for place, name in reversed(list(enumerate(names)))], now)
    for order in orders:
        if isinstance(order, Save):
            orders = orders + tiers.saved(order, checksum=order.block_hash[0], now=now)
    tiers.check_invariants()
    return orders


def spill(tiers, now=0.0):
    """Everything that can be spilled is."""
    done = []
    while orders := tiers.spills(now):
        for order in orders:
            if isinstance(order, Spill):
                done.append(order.block_hash)
                tiers.spilled(order, order.checksum, now)
        tiers.check_invariants()
    return done


def plan(tiers, names=CHAIN, matched=0, now=0.0, **options):
    return tiers.plan(names, matched, 16 * len(names) + 5, now, **options)


def media(plan):
    return [tier.name[0] for tier in plan.sources]


def fetch(tiers, result, names=CHAIN, now=0.0, peer=None):
    started = tiers.begin(plan(tiers, names, now=now, peer=peer), names, peer)
    tiers.check_invariants()
    orders = tiers.ended(started, result, now)
    tiers.check_invariants()
    return orders


def names(orders, kind):
    return [order.block_hash for order in orders if isinstance(order, kind)]


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ["block_tokens", "block_bytes", "layers", "spills_at_once", "saves_at_once"])
def test_senseless_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        make(**{name: 0})


def test_written_back_once_and_only_touched_again():
    tiers = make(host=3)
    assert names(evict(tiers, CHAIN[:3]), Save) == [b"2", b"1", b"0"]
    assert evict(tiers, [b"2"]) == []  # back on the device in the meantime, evicted again
    assert names(evict(tiers, [b"x"]), Drop) == [b"1"]  # now the coldest
    assert tiers.counters.saved == 4


def test_a_tail_leaves_the_host_before_its_head():
    tiers = make(host=4, disk=0)
    evict(tiers, CHAIN[:4])
    dropped = [names(evict(tiers, [name]), Drop) for name in (b"w", b"x", b"y", b"z")]
    assert dropped == [[b"3"], [b"2"], [b"1"], [b"0"]]
    assert tiers.counters.lost == 4


def test_a_block_is_within_reach_when_it_is_written_and_not_before():
    tiers = make()
    (order,) = tiers.evicted([Evicted(b"0", (7,))], 0.0)
    assert order == Save(b"0", (7,), Tier.HOST) and media(plan(tiers)) == []
    tiers.saved(order, 5, 0.0)
    assert media(plan(tiers)) == ["H"]
    started = tiers.begin(plan(tiers), CHAIN)
    assert (started.block_hashes, started.checksums, started.peer) == ((b"0",), (5,), None)


def test_a_reach_ends_at_the_first_block_nobody_has():
    tiers = make()
    evict(tiers, [b"0", b"1", b"3"])
    assert media(plan(tiers)) == ["H", "H"]
    assert media(plan(tiers, matched=3)) == ["H"] and media(plan(tiers, matched=2)) == []


def test_spills_are_ahead_of_need_coldest_first_and_bounded():
    tiers = make(host=4, spill_ahead=3, spills_at_once=2)
    evict(tiers, CHAIN[:4])
    orders = tiers.spills(0.0)
    assert names(orders, Spill) == [b"3", b"2"] and tiers.spills(0.0) == []  # two at once
    for order in orders:
        tiers.spilled(order, order.checksum, 0.0)
    assert spill(tiers) == [b"1"] and tiers.spills(0.0) == []  # the youngest is not spilled yet
    assert media(plan(tiers)) == ["H", "H", "H", "H"]
    assert names(evict(tiers, [b"w", b"x"]), Drop) == [b"3", b"2"] and tiers.counters.lost == 0
    assert media(plan(tiers)) == ["H", "H", "D", "D"]


def test_without_a_host_the_device_writes_to_disk():
    tiers = make(host=0, disk=2)
    assert [order.target for order in evict(tiers, CHAIN[:2])] == [Tier.DISK, Tier.DISK]
    assert media(plan(tiers)) == ["D", "D"]


def test_a_disk_that_takes_nothing_is_given_no_more_than_so_many_blocks_at_once():
    """Each waits in memory, and a disk may be a thousand times as large."""
    tiers = make(host=0, disk=100, saves_at_once=2)
    orders = tiers.evicted([Evicted(name, (0,)) for name in CHAIN], 0.0)
    assert names(orders, Save) == CHAIN[:2] and tiers.counters.not_saved == 4
    assert tiers.evicted([Evicted(b"x", (0,))], 1.0) == []
    tiers.saved(orders[0], 1, 2.0)
    tiers.not_saved(orders[1], 2.0)
    tiers.check_invariants()
    assert names(tiers.evicted([Evicted(name, (0,)) for name in (b"y", b"z")], 9.0), Save) == [b"y", b"z"]


def test_no_tier_at_all_decides_nothing():
    tiers = make(host=0, disk=0)
    assert evict(tiers, CHAIN) == [] and tiers.spills(0.0) == [] and media(plan(tiers)) == []
    assert tiers.counters.not_saved == 6


def test_disk_writes_keep_to_their_budget():
    tiers = make(host=4, disk=4, spill_ahead=4, disk_bytes_per_day=48_000)  # a burst of 2 blocks of 1,000
    evict(tiers, CHAIN[:4])
    assert spill(tiers) == [b"3", b"2"] and tiers.counters.over_budget
    assert spill(tiers, now=10.0) == []
    assert spill(tiers, now=2_000.0) == [b"1"]  # 46,000 a day: one in 1,878 s
    assert tiers.budget.spent_bytes == 3_000


def test_a_full_disk_stops_writing_for_a_while_and_loses_nothing_that_is_there():
    tiers = make(host=2, spill_ahead=2)
    evict(tiers, CHAIN[:2])
    spill(tiers)
    evict(tiers, [b"w", b"x"])
    (order,) = tiers.spills(0.0)[:1]
    assert tiers.not_spilled(order, now=0.0) == [Drop(order.block_hash, Tier.DISK)]
    tiers.check_invariants()
    assert tiers.spills(0.5) == []
    assert media(plan(tiers, now=0.5)) == ["D", "D"]
    assert names(tiers.spills(1.5), Spill)


def test_a_host_that_cannot_be_written_loses_blocks_and_nothing_else():
    tiers = make()
    (order,) = tiers.evicted([Evicted(b"0", (0,))], 0.0)
    assert tiers.not_saved(order, now=0.0) == [Drop(b"0", Tier.HOST)]
    assert tiers.evicted([Evicted(b"1", (0,))], 0.5) == [] and tiers.counters.not_saved == 2
    assert names(evict(tiers, [b"1"], now=1.0), Save) == [b"1"]


def test_a_host_full_of_copies_in_flight_takes_no_more():
    tiers = make(host=2)
    saves = tiers.evicted([Evicted(b"0", (0,)), Evicted(b"1", (1,)), Evicted(b"2", (2,))], 0.0)
    assert names(saves, Save) == [b"0", b"1"] and tiers.counters.not_saved == 1


def test_what_is_fetched_is_young_again_head_last():
    tiers = make(host=6, disk=0)
    evict(tiers, CHAIN[:3])
    evict(tiers, [b"w", b"x", b"y"])
    fetch(tiers, FetchResult(3, ()))
    dropped = [names(evict(tiers, [name]), Drop) for name in (b"a", b"b", b"c", b"d", b"e", b"f")]
    assert dropped == [[b"y"], [b"x"], [b"w"], [b"2"], [b"1"], [b"0"]]
    assert tiers.counters.fetched == {Tier.HOST: 3, Tier.DISK: 0, Tier.PEER: 0}


def test_a_source_is_not_dropped_while_it_is_read():
    tiers = make(host=2, disk=0)
    evict(tiers, CHAIN[:2])
    started = tiers.begin(plan(tiers), CHAIN)
    assert evict(tiers, [b"x"]) == [] and tiers.counters.not_saved == 1
    assert tiers.ended(started, FetchResult(2, ()), 0.0) == []
    assert names(evict(tiers, [b"x"]), Drop) == [b"1"]


def test_corrupt_bytes_are_dropped_and_the_rest_is_recomputed():
    tiers = make()
    evict(tiers, CHAIN[:4])
    tiers.take_events()
    assert fetch(tiers, FetchResult(1, (), Trouble.CORRUPT)) == [Drop(b"1", Tier.HOST)]
    assert media(plan(tiers)) == ["H"] and tiers.counters.corrupt == 1
    assert tiers.take_events() == [BlocksRemoved((b"1",), medium="CPU")]


def test_two_fetches_that_find_the_same_corrupt_block_drop_it_once():
    tiers = make()
    evict(tiers, CHAIN[:2])
    tiers.take_events()
    fetches = [tiers.begin(plan(tiers), CHAIN) for _ in range(2)]
    orders = [tiers.ended(started, FetchResult(0, (), Trouble.CORRUPT), 0.0) for started in fetches]
    assert orders == [[], [Drop(b"0", Tier.HOST)]]
    assert len(tiers.take_events()) == 1 and media(plan(tiers)) == []


def test_a_slow_tier_is_left_until_its_slowness_has_faded():
    tiers = make(host=0, disk=6)
    evict(tiers, CHAIN)
    assert media(plan(tiers)) == ["D"] * 6
    for now in (1.0, 2.0, 3.0):
        if media(plan(tiers, now=now)):
            fetch(tiers, FetchResult(6, (Transfer(Tier.DISK, 6_000, 5.0),)), now=now)
    slow = plan(tiers, now=3.0)
    assert slow.sources == () and slow.within_reach == 6
    assert tiers.begin(slow, CHAIN) is None and tiers.counters.recomputed == 6
    assert media(plan(tiers, now=3_600.0)) == ["D"] * 6


def test_a_fetch_that_was_given_up_teaches_without_a_byte():
    tiers = make(host=0, disk=6)
    evict(tiers, CHAIN)
    tries = 0
    while media(plan(tiers, now=float(tries))):
        fetch(tiers, FetchResult(0, (), Trouble.LATE), now=float(tries))
        tries += 1
        assert tries < 10
    assert tiers.counters.late_fetches == tries > 0


def test_a_broken_disk_is_left_alone_for_a_while():
    tiers = make(host=0, disk=6)
    evict(tiers, CHAIN)
    fetch(tiers, FetchResult(0, (), Trouble.FAILED), now=1.0)
    assert media(plan(tiers, now=1.5)) == [] and media(plan(tiers, now=2.0)) == ["D"] * 6
    fetch(tiers, FetchResult(2, (), Trouble.FAILED), now=2.0)  # two came: it works, and then it did not
    assert media(plan(tiers, now=2.5)) == []
    assert tiers.counters.failed_fetches == 2


def test_an_abort_teaches_nothing():
    tiers = make()
    evict(tiers, CHAIN[:2])
    before = media(plan(tiers))
    fetch(tiers, FetchResult(1, (), Trouble.ABORTED))
    assert media(plan(tiers)) == before and tiers.counters.failed_fetches == 0


def test_a_fetch_ends_once():
    tiers = make()
    evict(tiers, CHAIN[:2])
    started = tiers.begin(plan(tiers), CHAIN)
    tiers.ended(started, FetchResult(2, ()), 0.0)
    assert tiers.ended(started, FetchResult(2, ()), 0.0) == []
    tiers.check_invariants()


# Peers


def test_a_named_peer_fills_what_we_lack():
    tiers = make()
    evict(tiers, CHAIN[:2])
    peer = PeerOffer("replica-2", 5)
    found = plan(tiers, peer=peer)
    assert media(found) == ["H", "H", "P", "P", "P"]
    started = tiers.begin(found, CHAIN, peer)
    assert started.peer == "replica-2" and started.checksums[2:] == (None, None, None)
    assert tiers.begin(plan(tiers), CHAIN, peer).peer is None


def test_the_faster_of_two_holders_is_read():
    tiers = make(host=0, disk=6, peer_bytes_per_s=1e12, peer_latency_s=0.0)
    evict(tiers, CHAIN)
    assert media(plan(tiers, peer=PeerOffer("near", 3))) == ["P", "P", "P", "D", "D", "D"]
    assert media(plan(make_slow_peer(), peer=PeerOffer("far", 3))) == ["D"] * 6


def make_slow_peer():
    tiers = make(host=0, disk=6, peer_bytes_per_s=1e3)
    evict(tiers, CHAIN)
    return tiers


def test_a_peer_that_fails_is_left_alone_and_others_are_not():
    tiers = make()
    bad, good = PeerOffer("bad", 6), PeerOffer("good", 6)
    fetch(tiers, FetchResult(0, (), Trouble.FAILED), now=1.0, peer=bad)
    assert media(plan(tiers, now=1.5, peer=bad)) == []
    assert media(plan(tiers, now=1.5, peer=good)) == ["P"] * 6
    fetch(tiers, FetchResult(0, (), Trouble.CORRUPT), now=3.0, peer=bad)
    assert media(plan(tiers, now=3.5, peer=bad)) == []


def test_speeds_are_measured_peer_by_peer():
    tiers = make()
    slow, fast = PeerOffer("slow", 6), PeerOffer("fast", 6)
    for now in range(5):
        if media(plan(tiers, now=float(now), peer=slow)):
            result = FetchResult(6, (Transfer(Tier.PEER, 6_000, 9.0),))
            fetch(tiers, result, now=float(now), peer=slow)
    assert media(plan(tiers, now=5.0, peer=slow)) == []
    assert media(plan(tiers, now=5.0, peer=fast)) == ["P"] * 6


def test_peers_known_are_bounded():
    tiers = make()
    for number in range(3 * MOST_PEERS):
        plan(tiers, peer=PeerOffer(f"p{number}", 6))
        tiers.check_invariants()


# The rest


def test_a_restart_finds_its_disk_again_and_deletes_what_does_not_fit():
    tiers = make(host=0, disk=3)
    orders = tiers.found_on_disk([(name, 9) for name in reversed(CHAIN[:5])])
    assert names(orders, Drop) == [b"4", b"3"]  # the oldest
    tiers.check_invariants()
    assert tiers.begin(plan(tiers), CHAIN).checksums == (9, 9, 9)
    assert make(disk=0).found_on_disk([(b"0", 9)]) == [Drop(b"0", Tier.DISK)]


def test_forget_all_waits_for_copies_in_flight():
    tiers = make(host=3, disk=2, spill_ahead=1)
    evict(tiers, CHAIN[:2])
    (late,) = tiers.evicted([Evicted(b"z", (0,))], 0.0)
    (spilling,) = tiers.spills(0.0)
    reading = tiers.begin(plan(tiers), CHAIN)
    assert tiers.current(reading)
    assert tiers.forget_all() == [] and not tiers.current(reading)
    tiers.check_invariants()
    assert media(plan(tiers)) == []
    assert tiers.spilled(spilling, 1, 0.0) == [Drop(b"1", Tier.DISK)]
    assert tiers.saved(late, 1, 0.0) == [Drop(b"z", Tier.HOST)]
    dropped = tiers.ended(reading, FetchResult(2, ()), 0.0)
    assert dropped == [Drop(b"1", Tier.HOST), Drop(b"0", Tier.HOST)]
    tiers.check_invariants()
    assert names(evict(tiers, CHAIN[:3]), Save) == [b"2", b"1", b"0"]


def test_events_name_the_medium():
    tiers = make(host=1, disk=1, spill_ahead=1)
    evict(tiers, [b"0"])
    spill(tiers)
    evict(tiers, [b"1"])
    assert tiers.take_events() == [
        BlocksStored((b"0",), None, (), 16, medium="CPU"),
        BlocksStored((b"0",), None, (), 16, medium="STORAGE"),
        BlocksRemoved((b"0",), medium="CPU"),
        BlocksStored((b"1",), None, (), 16, medium="CPU"),
    ]
    assert tiers.take_events() == []


def test_check_invariants_finds_damage():
    def damaged(damage):
        tiers = make(spill_ahead=1)
        evict(tiers, CHAIN[:3])
        tiers.spills(0.0)
        started = tiers.begin(plan(tiers), CHAIN)
        tiers.check_invariants()
        damage(tiers, started)
        with pytest.raises(AssertionError):
            tiers.check_invariants()

    host = Tier.HOST
    damaged(lambda tiers, started: tiers.shelves[host].unpin(b"0"))
    damaged(lambda tiers, started: tiers.shelves[host].pin(b"1"))
    damaged(lambda tiers, started: tiers.fetches.clear())
    damaged(lambda tiers, started: tiers._spilling.clear())
    damaged(lambda tiers, started: setattr(tiers.shelves[host], "capacity", 2))
    damaged(lambda tiers, started: tiers.shelves[host]._entries.pop(b"0"))
