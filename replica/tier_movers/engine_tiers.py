"""Lower tiers of one engine, and its peers: what is evicted is kept, what comes back sooner is waited for."""

import time
from collections.abc import Sequence as Row

from replica.batch import Batch
from replica.contract.kv_events import CacheEvent
from replica.engine_limits import EngineLimits, TierLimits
from replica.kv_cache.kept_budget import KeptBudget
from replica.kv_cache.tier_settings import TierCounters, TierSettings
from replica.kv_cache.tier_transport import Fetch, FetchResult, PeerOffer, Trouble
from replica.kv_cache.tiers import Tiers
from replica.model.fingerprint import fingerprint
from replica.model.load import LoadedModel
from replica.model.paged_kv import PagedKv
from replica.prefill_speed import PrefillSpeed
from replica.prefix_load import PrefixLoad
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from replica.tier_movers.disk_store import DiskStore
from replica.tier_movers.lending import Lending
from replica.tier_movers.peer_reader import PeerReader
from replica.tier_movers.torch_mover import TorchMover

SPILLED_SHARE = 0.125
"""Of the host's blocks, the coldest, that are on disk too; never fewer than one request can push out."""
SAVED_AT_ONCE_BYTES = 256 * 2**20
"""Without a host: memory for what a slow disk has not taken yet. More for a longer context."""


class EngineTiers:
    """Host, disk and peers behind one engine's cache; used from its thread only."""

    def __init__(
        self,
        model: LoadedModel,
        limits: EngineLimits,
        tiers: TierLimits,
        kv: PagedKv,
        scheduler: Scheduler,
    ) -> None:
        """Raises OSError when the disk's folder cannot be used, ValueError for a tier below one block."""
        self._scheduler = scheduler
        self._measured = PrefillSpeed() if tiers.prefill is None else None
        settings = _settings(tiers, limits, kv)
        self._tiers = Tiers(settings, tiers.prefill or PrefillSpeed().cost, time.monotonic())
        self.fingerprint = ""
        """Of all that KV depends on beside tokens; empty where no other process gets or gives any."""
        if tiers.disk_folder is not None or tiers.peers is not None:
            self.fingerprint = fingerprint(
                model, limits.block_size, batch_invariant=limits.batch_invariant, kv_int8=limits.kv_int8
            )
        disk, budget = None, None
        if tiers.disk_folder is not None:
            disk = DiskStore(tiers.disk_folder, self.fingerprint, settings.block_bytes)
            budget = KeptBudget(self._tiers.budget, disk.budget_record(), time.monotonic(), time.time())
        peers = None
        if tiers.peers is not None:
            peers = PeerReader(self.fingerprint, tiers.peers.key, settings.block_bytes)
        self._mover = TorchMover(self._tiers, kv, scheduler.loads, disk, self._fetched, peers, budget)
        self._lending = Lending(scheduler.cache, kv, self._mover.on_host)
        self._asks_peers = peers is not None
        self._waiting: dict[int, Sequence] = {}
        """Whose prefix is on its way, by number of the fetch."""
        if disk is not None:
            self._mover.carry_out(self._tiers.found_on_disk((name, None) for name in disk.found()))

    @property
    def waiting(self) -> list[Sequence]:
        """Requests whose prefix is on its way; the scheduler gets them when it has come, or will not."""
        return list(self._waiting.values())

    @property
    def busy(self) -> bool:
        """``advance`` must be called again, although nothing may run."""
        return self._mover.busy

    @property
    def counters(self) -> TierCounters:
        """What became of blocks."""
        return self._tiers.counters

    def fetch_for(self, sequence: Sequence, source: PeerOffer | None = None) -> bool:
        """Begin to fetch what a new request lacks; False: nothing is worth it, let the scheduler have it.

        ``source``: a peer that may be asked, too.
        """
        cache, loads, now = self._scheduler.cache, self._scheduler.loads, time.monotonic()
        if not cache.enabled or not sequence.reads_cache:
            return False
        hashes = cache.block_hashes(sequence)
        matched = len(cache.match(sequence)) * cache.block_size // cache.hash_tokens
        peer = source if self._asks_peers else None
        plan = self._tiers.plan(hashes, matched, sequence.prompt_tokens, now, peer=peer)
        # The sources are kept first: room for the load may evict, and that needs room on the host.
        fetch = self._tiers.begin(plan, hashes, peer)
        if fetch is None:
            return False
        load = loads.begin(sequence, plan.stop_block * cache.hash_tokens)
        self.save_evicted()
        if load is None:
            self._mover.carry_out(self._tiers.ended(fetch, FetchResult(0, (), Trouble.ABORTED), now))
            return False
        self._waiting[fetch.number] = sequence
        self._mover.fetch(fetch, load)
        return True

    def lend(self, prompt: Sequence, wanted: Row[int]) -> list[tuple[bytes, memoryview]]:
        """See ``Lending.lend``; between two steps."""
        return self._lending.lend(prompt, wanted)

    def abort(self, request_id: str) -> None:
        """Forget a request that waits for its prefix; nothing if none does."""
        for number, sequence in list(self._waiting.items()):
            if sequence.request_id == request_id:
                del self._waiting[number]
                self._mover.give_up(self._tiers.fetches[number])

    def advance(self, wait_s: float = 0.0) -> None:
        """Between steps: go on with what is under way. ``wait_s``: how long to wait if nothing has come."""
        self._mover.advance(wait_s)

    def save_evicted(self) -> None:
        """Before anything is written to the device: keep what was evicted from it."""
        evicted = self._scheduler.cache.take_evictions()
        if evicted:
            self._mover.carry_out(self._tiers.evicted(evicted, time.monotonic()))

    def ran(self, batch: Batch, seconds: float) -> None:
        """A step took so long: what computing costs, fetching must beat."""
        if self._measured is not None:
            self._measured.observe(batch, seconds)
            self._tiers.prefill = self._measured.cost

    def forget_all(self) -> None:
        """Nothing that is kept may be used any more. Only while nothing is on its way to the device."""
        self._mover.carry_out(self._tiers.forget_all())

    def take_events(self) -> list[CacheEvent]:
        """What became readable or not on host and disk since the last call."""
        return self._tiers.take_events()

    def close(self) -> None:
        """End what is under way; files stay for the next process."""
        self._mover.close()

    def check_invariants(self) -> None:
        """Raise AssertionError unless tiers, fetches and waiting requests agree; for tests."""
        self._tiers.check_invariants()
        assert set(self._waiting) == set(self._tiers.fetches), "a request waits for nothing"

    def _fetched(self, fetch: Fetch, load: PrefixLoad) -> None:
        sequence = self._waiting.pop(fetch.number, None)
        if sequence is not None:
            self._scheduler.add(sequence)


def _settings(tiers: TierLimits, limits: EngineLimits, kv: PagedKv) -> TierSettings:
    block_size = limits.block_size
    block_bytes = kv.bytes_per_token * block_size
    host_blocks = tiers.host_bytes // block_bytes
    disk_blocks = tiers.disk_bytes // block_bytes if tiers.disk_folder is not None else 0
    for name, size_bytes, blocks in (
        ("host", tiers.host_bytes, host_blocks),
        ("disk", tiers.disk_bytes, disk_blocks),
    ):
        if size_bytes and not blocks:
            raise ValueError(f"{name}: {size_bytes} bytes hold no block of {block_bytes}; give it more")
    longest_request = -(-limits.max_model_len // block_size)
    # Less than one request can push out at once would lose the heads of what is kept.
    saves_at_once = max(SAVED_AT_ONCE_BYTES // block_bytes, longest_request)
    spill_ahead = min(host_blocks, max(int(SPILLED_SHARE * host_blocks), longest_request))
    return TierSettings(
        block_tokens=block_size,
        block_bytes=block_bytes,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        disk_bytes_per_day=tiers.disk_bytes_per_day,
        spill_ahead=spill_ahead if disk_blocks else 0,
        saves_at_once=saves_at_once,
    )
