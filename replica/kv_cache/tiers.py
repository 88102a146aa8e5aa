"""Which KV blocks lie on host and disk, what goes where when the device evicts, and what a request fetches.

Pure decisions: a mover carries out the orders and reports back (``tier_transport``). A block hash is the
32-byte chained digest, so it names content and everything before it. Rules:

- The device evicts: the block is written back to the host (once; what is there already is only touched).
- The host's coldest blocks are copied to disk ahead of need, within the disk's daily write budget, so that
  making room on the host is a deletion.
- A full, failing or slow tier loses blocks or is passed over: the request computes them. Nothing raises.
- A block is read only after it was written whole, and never deleted while it is copied.

Host of two blocks, disk of two, one block spilled ahead. The device evicts three:

>>> settings = TierSettings(block_tokens=16, block_bytes=1_000, host_blocks=2, disk_blocks=2, spill_ahead=1)
>>> tiers = Tiers(settings, PrefillCost(0.001, 1e-3), now=0.0)
>>> orders = tiers.evicted([Evicted(b"c", (7,)), Evicted(b"b", (5,))], now=1.0)
>>> [(order.block_hash, order.target.value) for order in orders]
[(b'c', 'CPU'), (b'b', 'CPU')]
>>> [tiers.saved(order, checksum=1, now=1.1) for order in orders], tiers.spills(now=1.1)
([[], []], [Spill(block_hash=b'c', checksum=1)])
>>> tiers.spilled(Spill(b"c", 1), checksum=1, now=1.2)
[]
>>> tiers.evicted([Evicted(b"a", (3,))], now=2.0)[0]               # c is on disk: the host can drop it
Drop(block_hash=b'c', tier=<Tier.HOST: 'CPU'>)
>>> plan = tiers.plan([b"a", b"b", b"c"], 0, prompt_tokens=50, now=2.0)     # a is still being written
>>> plan.sources
()
>>> _ = tiers.saved(Save(b"a", (3,)), checksum=1, now=2.1)
>>> [tier.value for tier in tiers.plan([b"a", b"b", b"c"], 0, prompt_tokens=50, now=2.2).sources]
['CPU', 'CPU', 'STORAGE']
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from replica.contract.kv_events import BlockHash, BlocksRemoved, BlocksStored, CacheEvent
from replica.contract.prefill_cost import PrefillCost
from replica.contract.transfer_speed import TransferSpeed
from replica.kv_cache.cache import Evicted
from replica.kv_cache.cache_record import drained
from replica.kv_cache.fetch_plan import FetchPlan, Tier, TierSpeed, plan_fetch
from replica.kv_cache.tier_health import TierHealth
from replica.kv_cache.tier_settings import TierCounters, TierSettings
from replica.kv_cache.tier_shelf import TierShelf
from replica.kv_cache.tier_transport import (
    Drop,
    Fetch,
    FetchResult,
    Order,
    PeerOffer,
    Save,
    Spill,
    Trouble,
)
from replica.kv_cache.write_budget import WriteBudget

MOST_PEERS = 64
"""Peers whose speed is remembered."""


class Tiers:
    """The owner of what is known about host, disk and peers. Time comes in as ``now`` in seconds."""

    def __init__(self, settings: TierSettings, prefill: PrefillCost, now: float) -> None:
        self.settings = settings
        self.prefill = prefill
        """May be replaced as the replica's own cost is measured."""
        self.counters = TierCounters()
        self.shelves = {
            Tier.HOST: TierShelf(settings.host_blocks),
            Tier.DISK: TierShelf(settings.disk_blocks),
        }
        self.budget = WriteBudget(settings.disk_bytes_per_day, now)
        self.fetches: dict[int, Fetch] = {}
        """In flight."""
        self._spilling: set[BlockHash] = set()
        self._saving: set[BlockHash] = set()
        """From the device to disk."""
        self._reads = {Tier.HOST: TierHealth(), Tier.DISK: TierHealth()}
        self._writes = {Tier.HOST: TierHealth(), Tier.DISK: TierHealth()}
        self._speeds = {
            Tier.HOST: TransferSpeed(settings.host_latency_s, settings.host_bytes_per_s),
            Tier.DISK: TransferSpeed(settings.disk_latency_s, settings.disk_bytes_per_s),
        }
        self._peers: OrderedDict[str, tuple[TransferSpeed, TierHealth]] = OrderedDict()
        self._fetch_number = 0
        self._epoch = 0
        self._events: list[CacheEvent] = []

    # The device evicts

    def evicted(self, blocks: Iterable[Evicted], now: float) -> list[Order]:
        """Blocks left the device; what to copy, before the next step, and what to delete for that."""
        orders: list[Order] = []
        target = Tier.HOST if self.settings.host_blocks else Tier.DISK
        shelf = self.shelves[target]
        for block in blocks:
            name = block.block_hash
            if shelf.readable(name) or shelf.arriving(name):
                shelf.touch(name)
            elif (
                name not in shelf
                and len(self._saving) < self.settings.saves_at_once
                and self._may_write(target, now)
                and self._make_room(target, orders)
            ):
                shelf.reserve(name)
                orders.append(Save(name, block.blocks, target))
                if target is Tier.DISK:
                    self._saving.add(name)
            else:
                self.counters.not_saved += 1
        return orders

    def saved(self, save: Save, checksum: int | None, now: float) -> list[Order]:
        """A ``Save`` is done: the block can be fetched. ``checksum`` travels with it from now on."""
        self.counters.saved += 1
        self._saving.discard(save.block_hash)
        self._writes[save.target].worked()
        return self._written(save.target, save.block_hash, checksum)

    def not_saved(self, save: Save, now: float) -> list[Order]:
        """A ``Save`` failed."""
        self.counters.not_saved += 1
        self._saving.discard(save.block_hash)
        self._writes[save.target].failed(now)
        return self._drop_if(
            self.shelves[save.target].not_written(save.block_hash), save.target, save.block_hash
        )

    # The host spills

    def spills(self, now: float) -> list[Order]:
        """Copies from host to disk that should begin now; ask again whenever a save or a spill is done."""
        orders: list[Order] = []
        host, disk = self.shelves[Tier.HOST], self.shelves[Tier.DISK]
        settings = self.settings
        for block_hash in host.coldest(settings.spill_ahead):
            if len(self._spilling) >= settings.spills_at_once:
                break
            if block_hash in disk:
                continue
            if not self._may_write(Tier.DISK, now) or not self._make_room(Tier.DISK, orders):
                break
            disk.reserve(block_hash)
            host.pin(block_hash)
            self._spilling.add(block_hash)
            orders.append(Spill(block_hash, host.checksum(block_hash)))
        return orders

    def spilled(self, spill: Spill, checksum: int | None, now: float) -> list[Order]:
        """A ``Spill`` is done: the disk has the block too."""
        self.counters.spilled += 1
        self._writes[Tier.DISK].worked()
        return self._spill_over(spill) + self._written(Tier.DISK, spill.block_hash, checksum)

    def not_spilled(self, spill: Spill, now: float) -> list[Order]:
        """A ``Spill`` failed: disk full, too slow, gone. The host still has the block."""
        self._writes[Tier.DISK].failed(now)
        gone = self.shelves[Tier.DISK].not_written(spill.block_hash)
        return self._spill_over(spill) + self._drop_if(gone, Tier.DISK, spill.block_hash)

    def found_on_disk(self, blocks: Iterable[tuple[BlockHash, int | None]]) -> list[Order]:
        """At start: what an earlier process left on disk, oldest first; what does not fit is deleted."""
        disk = self.shelves[Tier.DISK]
        orders: list[Order] = []
        for block_hash, checksum in blocks:
            if block_hash not in disk and self._make_room(Tier.DISK, orders):
                disk.reserve(block_hash)
                orders += self._written(Tier.DISK, block_hash, checksum)
            elif block_hash not in disk:
                orders.append(Drop(block_hash, Tier.DISK))
        return orders

    # A request fetches

    def plan(
        self,
        block_hashes: Sequence[BlockHash],
        matched_blocks: int,
        prompt_tokens: int,
        now: float,
        *,
        peer: PeerOffer | None = None,
        wait_s: float = 0.0,
    ) -> FetchPlan:
        """What a request should fetch, given that the device holds its first ``matched_blocks``.

        ``block_hashes``: of the prompt's full blocks. ``wait_s``: time until it could be computed anyway.
        """
        speeds = {tier: TierSpeed(*speed.fit(now)) for tier, speed in self._speeds.items()}
        if peer is not None:
            speed, health = self._peer(peer.name)
            speeds[Tier.PEER] = TierSpeed(*speed.fit(now))
            if not health.usable(now):
                peer = None
        missing_bytes = (len(block_hashes) - matched_blocks) * self.settings.block_bytes
        order = sorted(speeds, key=lambda tier: speeds[tier].seconds(missing_bytes))
        usable = {tier: health.usable(now) for tier, health in self._reads.items()}
        reach: list[Tier] = []
        for place in range(matched_blocks, len(block_hashes)):
            for tier in order:
                if tier is Tier.PEER:
                    if peer is not None and place < peer.blocks:
                        break
                elif usable[tier] and self.shelves[tier].readable(block_hashes[place]):
                    break
            else:
                break
            reach.append(tier)
        return plan_fetch(
            prompt_tokens,
            matched_blocks,
            reach,
            speeds,
            self.prefill,
            block_tokens=self.settings.block_tokens,
            block_bytes=self.settings.block_bytes,
            layers=self.settings.layers,
            wait_s=wait_s,
        )

    def begin(
        self, plan: FetchPlan, block_hashes: Sequence[BlockHash], peer: PeerOffer | None = None
    ) -> Fetch | None:
        """Keep the sources of a plan just made; None: it fetches nothing.

        Nothing may come in between: room for the load is made afterwards.
        """
        self.counters.recomputed += plan.within_reach - len(plan.sources)
        if not plan.sources:
            return None
        names = tuple(block_hashes[plan.start_block : plan.stop_block])
        checksums: list[int | None] = []
        for block_hash, tier in zip(names, plan.sources, strict=True):
            if tier is Tier.PEER:
                checksums.append(None)
                continue
            self.shelves[tier].pin(block_hash)
            checksums.append(self.shelves[tier].checksum(block_hash))
        self._fetch_number += 1
        by_peer = peer.name if peer is not None and Tier.PEER in plan.sources else None
        fetch = Fetch(self._fetch_number, plan, names, tuple(checksums), by_peer, self._epoch)
        self.fetches[fetch.number] = fetch
        return fetch

    def ended(self, fetch: Fetch, result: FetchResult, now: float) -> list[Order]:
        """A fetch is over, well or not; what it taught is remembered. A second report is ignored."""
        if self.fetches.pop(fetch.number, None) is None:
            return []
        orders: list[Order] = []
        sources = fetch.plan.sources
        for transfer in result.transfers:
            self._speed_of(transfer.tier, fetch.peer).observe(transfer.size_bytes, transfer.seconds, now)
        for tier in sources[: result.arrived]:
            self.counters.fetched[tier] += 1
        blamed = result.arrived if result.arrived < len(sources) else None
        for tier in dict.fromkeys(sources[: result.arrived]):
            self._read_health(tier, fetch.peer).worked()
        if blamed is not None:
            self._learn(result, sources[blamed], fetch, now)
        # Deep blocks first: a prefix stays younger than what continues it.
        for place in range(len(sources) - 1, -1, -1):
            tier, block_hash = sources[place], fetch.block_hashes[place]
            if tier is Tier.PEER:
                continue
            shelf = self.shelves[tier]
            if place == blamed and result.trouble is Trouble.CORRUPT:
                self._forget(tier, block_hash)
            elif place < result.arrived:
                shelf.touch(block_hash)
            orders += self._drop_if(shelf.unpin(block_hash), tier, block_hash)
        return orders

    # Everything goes

    def forget_all(self) -> list[Order]:
        """The weights changed: nothing that is kept, or on its way, may be used any more."""
        self._epoch += 1
        orders: list[Order] = []
        for tier, shelf in self.shelves.items():
            for block_hash in shelf.hashes:
                orders += self._forget(tier, block_hash)
        return orders

    def current(self, fetch: Fetch) -> bool:
        """What a fetch brings may be published: nothing was forgotten since it began."""
        return fetch.epoch == self._epoch

    def take_events(self) -> list[CacheEvent]:
        """What became readable or not since the last call, by medium; blocks have no parent or tokens."""
        return drained(self._events)

    def check_invariants(self) -> None:
        """Raise AssertionError unless shelves, spills and fetches in flight agree."""
        pins: dict[tuple[Tier, BlockHash], int] = {}
        for fetch in self.fetches.values():
            for block_hash, tier in zip(fetch.block_hashes, fetch.plan.sources, strict=True):
                pins[tier, block_hash] = pins.get((tier, block_hash), 0) + 1
        for block_hash in self._spilling:
            pins[Tier.HOST, block_hash] = pins.get((Tier.HOST, block_hash), 0) + 1
            assert block_hash in self.shelves[Tier.DISK]
        for tier, shelf in self.shelves.items():
            shelf.check_invariants()
            for block_hash in shelf.hashes:
                assert shelf.readers(block_hash) == pins.pop((tier, block_hash), 0), (tier, block_hash)
        assert all(tier is Tier.PEER for tier, _ in pins), "a source is gone while it is read"
        assert len(self._spilling) <= self.settings.spills_at_once
        assert len(self._saving) <= self.settings.saves_at_once
        assert all(block_hash in self.shelves[Tier.DISK] for block_hash in self._saving)
        assert len(self._peers) <= MOST_PEERS

    # Inside

    def _make_room(self, tier: Tier, orders: list[Order]) -> bool:
        """Room for one block on a shelf, deleting its coldest if need be; False: all are being copied."""
        shelf = self.shelves[tier]
        if shelf.room > 0:
            return True
        coldest = next(shelf.oldest(), None)
        if coldest is None:
            return False
        if tier is Tier.HOST and not self.shelves[Tier.DISK].readable(coldest):
            self.counters.lost += 1
        orders += self._forget(tier, coldest)
        return True

    def _may_write(self, tier: Tier, now: float) -> bool:
        """It takes writes and has or can make room; a block for the disk is taken from its budget."""
        shelf = self.shelves[tier]
        if not self._writes[tier].usable(now) or (shelf.room <= 0 and next(shelf.oldest(), None) is None):
            return False
        if tier is Tier.DISK and not self.budget.take(self.settings.block_bytes, now):
            self.counters.over_budget += 1
            return False
        return True

    def _forget(self, tier: Tier, block_hash: BlockHash) -> list[Order]:
        """Not readable from now on; deleted now or when the last copy ends."""
        shelf = self.shelves[tier]
        if shelf.readable(block_hash):
            self._events.append(BlocksRemoved((block_hash,), medium=tier.value))
        return self._drop_if(shelf.doom(block_hash), tier, block_hash)

    def _written(self, tier: Tier, block_hash: BlockHash, checksum: int | None) -> list[Order]:
        gone = self.shelves[tier].written(block_hash, checksum)
        if self.shelves[tier].readable(block_hash):
            tokens = self.settings.block_tokens
            self._events.append(BlocksStored((block_hash,), None, (), tokens, medium=tier.value))
        return self._drop_if(gone, tier, block_hash)

    def _spill_over(self, spill: Spill) -> list[Order]:
        self._spilling.remove(spill.block_hash)
        gone = self.shelves[Tier.HOST].unpin(spill.block_hash)
        return self._drop_if(gone, Tier.HOST, spill.block_hash)

    def _drop_if(self, gone: bool, tier: Tier, block_hash: BlockHash) -> list[Order]:
        return [Drop(block_hash, tier)] if gone else []

    def _learn(self, result: FetchResult, tier: Tier, fetch: Fetch, now: float) -> None:
        trouble = result.trouble
        if trouble is Trouble.CORRUPT:
            self.counters.corrupt += 1
            if tier is Tier.PEER:
                self._read_health(tier, fetch.peer).failed(now)
        elif trouble is Trouble.FAILED:
            self.counters.failed_fetches += 1
            self._read_health(tier, fetch.peer).failed(now)
        elif trouble is Trouble.GONE:
            self.counters.gone += 1
            self._read_health(tier, fetch.peer).worked()
        elif trouble is Trouble.LATE:
            self.counters.late_fetches += 1
            if all(transfer.tier is not tier for transfer in result.transfers):
                # Not a byte came: without this a tier that never answers would be asked again and again.
                self._speed_of(tier, fetch.peer).observe(0, fetch.plan.give_up_s, now)

    def _speed_of(self, tier: Tier, peer: str | None) -> TransferSpeed:
        return self._peer(peer or "")[0] if tier is Tier.PEER else self._speeds[tier]

    def _read_health(self, tier: Tier, peer: str | None) -> TierHealth:
        return self._peer(peer or "")[1] if tier is Tier.PEER else self._reads[tier]

    def _peer(self, name: str) -> tuple[TransferSpeed, TierHealth]:
        if name not in self._peers:
            settings = self.settings
            speed = TransferSpeed(settings.peer_latency_s, settings.peer_bytes_per_s)
            self._peers[name] = (speed, TierHealth())
            if len(self._peers) > MOST_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(name)
        return self._peers[name]
