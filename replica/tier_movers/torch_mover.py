"""Moves KV between the torch runner's memory, tensors on the host, files and peers; reports to ``Tiers``.

Everything but reading and writing files and asking peers happens in the engine's thread, between steps. A
fetch writes its blocks in order as they come, at most ``COPY_BYTES`` of all fetches between two steps, so
that running replies go on. A failure of any kind is a report: the request computes what did not come.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from replica.contract.kv_events import BlockHash
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.kept_budget import KeptBudget
from replica.kv_cache.tier_transport import Drop, Fetch, FetchResult, Order, Save, Spill, Transfer, Trouble
from replica.kv_cache.tiers import Tiers
from replica.model.paged_kv import PagedKv
from replica.peers.peer_call import PeerCall, Stopped
from replica.prefix_load import PrefixLoad, PrefixLoads
from replica.tier_movers.background import Background, Report
from replica.tier_movers.disk_store import CorruptBlock, DiskStore
from replica.tier_movers.peer_reader import PeerReader

log = logging.getLogger("warmroute.replica")

COPY_BYTES = 32 * 2**20


@dataclass(slots=True)
class _Copy:
    """A fetch on its way to the device."""

    fetch: Fetch
    load: PrefixLoad
    began_s: float
    came: dict[int, bytearray | Trouble] = field(default_factory=dict)
    """What came from disk and peer, by place in the fetch."""
    call: PeerCall | None = None
    """The question to the peer, if there is one."""
    arrived: int = 0
    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    seconds_by_tier: dict[Tier, float] = field(default_factory=dict)

    def took(self, tier: Tier, size_bytes: int, seconds: float) -> None:
        """So much came from there."""
        self.bytes_by_tier[tier] = self.bytes_by_tier.get(tier, 0) + size_bytes
        self.seconds_by_tier[tier] = self.seconds_by_tier.get(tier, 0.0) + seconds

    def result(self, trouble: Trouble | None) -> FetchResult:
        """How it ended."""
        transfers = [
            Transfer(tier, size, self.seconds_by_tier[tier]) for tier, size in self.bytes_by_tier.items()
        ]
        return FetchResult(self.arrived, tuple(transfers), trouble)


class TorchMover:
    """A ``TierMover`` for one engine; see there for when to call what."""

    def __init__(
        self,
        tiers: Tiers,
        kv: PagedKv,
        loads: PrefixLoads,
        disk: DiskStore | None,
        ended: Callable[[Fetch, PrefixLoad], None],
        peers: PeerReader | None = None,
        budget: KeptBudget | None = None,
    ) -> None:
        """``ended``: called when a fetch is over, however it went, while its blocks are still held.

        ``peers``: asks other replicas, if any are to be asked. ``budget``: what the disk has to remember of
        the writes it was granted.
        """
        self._tiers = tiers
        self._kv = kv
        self._loads = loads
        self._disk = disk
        self._ended = ended
        self._peers = peers
        self._budget = budget
        self._background = Background(peers=peers is not None)
        self._host: dict[BlockHash, torch.Tensor] = {}
        self._copies: dict[int, _Copy] = {}
        self._writes = 0
        """On their way to disk."""

    @property
    def busy(self) -> bool:
        """Something is under way of which ``advance`` will hear."""
        return bool(self._copies or self._writes)

    # What Tiers orders

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Begin these. Device memory of every ``Save`` is read before this returns."""
        self._keep_budget()
        todo = deque(orders)
        while todo:
            match todo.popleft():
                case Save() as save:
                    todo += self._save(save)
                case Spill() as spill:
                    self._write(
                        spill.block_hash,
                        self._host[spill.block_hash],
                        partial(self._tiers.spilled, spill),
                        partial(self._tiers.not_spilled, spill),
                    )
                case Drop(block_hash, Tier.HOST):
                    self._host.pop(block_hash, None)  # not there if it could not be copied
                case Drop(block_hash):
                    self._delete(block_hash)

    def fetch(self, fetch: Fetch, load: PrefixLoad) -> None:
        """Begin to copy ``fetch.block_hashes``, in order, into ``load.blocks``."""
        copy = _Copy(fetch, load, time.monotonic())
        self._copies[fetch.number] = copy
        for place, tier in enumerate(fetch.plan.sources):
            if tier is Tier.DISK:
                self._read(copy, place)
        if fetch.peer is not None:
            self._ask(copy, fetch.peer)

    # Between steps

    def advance(self, wait_s: float = 0.0) -> None:
        """Take what came from disk, write it and what is on the host to the device, end what is over.

        ``wait_s``: how long to wait for the disk when nothing else can be done.
        """
        held = any(self._next_is_here(copy) for copy in self._copies.values())
        self._background.take(0.0 if held else wait_s)
        room = COPY_BYTES
        for copy in list(self._copies.values()):
            room -= self._copy_what_is_here(copy, room)
        self.carry_out(self._tiers.spills(time.monotonic()))

    def give_up(self, fetch: Fetch) -> None:
        """Nobody wants it any more."""
        self._end(self._copies[fetch.number], Trouble.ABORTED)

    def on_host(self, block_hash: BlockHash) -> torch.Tensor | None:
        """A block's KV, if the host has it."""
        return self._host.get(block_hash)

    def close(self) -> None:
        """End the threads and let go of the folder; files stay for the next process."""
        for copy in self._copies.values():
            if copy.call is not None:
                copy.call.close()
        self._background.close()
        if self._disk is not None:
            self._disk.close()

    # Inside

    def _save(self, save: Save) -> list[Order]:
        """Copy a block off the device; what follows from it."""
        try:
            block = self._kv.read(self._kv.slots(save.blocks))
        except (RuntimeError, MemoryError):  # torch's own for "no memory" is the first
            return self._tiers.not_saved(save, time.monotonic())
        if save.target is Tier.HOST:
            self._host[save.block_hash] = block
            return self._tiers.saved(save, None, time.monotonic())
        self._write(
            save.block_hash, block, partial(self._tiers.saved, save), partial(self._tiers.not_saved, save)
        )
        return []

    def _next_is_here(self, copy: _Copy) -> bool:
        return copy.fetch.plan.sources[copy.arrived] is Tier.HOST or copy.arrived in copy.came

    def _copy_what_is_here(self, copy: _Copy, room: int) -> int:
        """Bytes written to the device; ends the fetch when it is over."""
        fetch, size = copy.fetch, self._tiers.settings.block_bytes
        names, written = fetch.block_hashes, 0
        trouble: Trouble | None = None
        while copy.arrived < len(names) and written < room and self._next_is_here(copy):
            place = copy.arrived
            began_s = time.monotonic()
            if fetch.plan.sources[place] is Tier.HOST:
                self._to_device(copy, self._host[names[place]])
                copy.took(Tier.HOST, size, time.monotonic() - began_s)
            else:
                content = copy.came.pop(place)
                if isinstance(content, Trouble):
                    trouble = content
                    break
                self._to_device(copy, self._kv.from_bytes(content))
            copy.arrived += 1
            written += size
        tokens = (fetch.plan.start_block + copy.arrived) * self._tiers.settings.block_tokens
        self._loads.arrived(copy.load, max(copy.load.start, tokens))
        if trouble is not None or copy.arrived == len(names):
            self._end(copy, trouble)
        elif time.monotonic() - copy.began_s > fetch.plan.give_up_s:
            self._end(copy, Trouble.LATE)
        return written

    def _to_device(self, copy: _Copy, block: torch.Tensor) -> None:
        """Write the block at ``copy.arrived``. Of its first tokens finer pages may be there already."""
        tokens, page, load = self._tiers.settings.block_tokens, self._kv.block_size, copy.load
        first = (copy.fetch.plan.start_block + copy.arrived) * tokens
        begin = max(first, load.start)
        pages = load.blocks[(begin - load.start) // page : (first + tokens - load.start) // page]
        self._kv.write(self._kv.slots(pages), block[:, :, begin - first :])

    def _end(self, copy: _Copy, trouble: Trouble | None) -> None:
        del self._copies[copy.fetch.number]
        if copy.call is not None:
            copy.call.close()
        self.carry_out(self._tiers.ended(copy.fetch, copy.result(trouble), time.monotonic()))
        self._ended(copy.fetch, copy.load)
        self._loads.end(copy.load)

    # The disk and the peers, in other threads

    def _read(self, copy: _Copy, place: int) -> None:
        disk = self._disk
        assert disk is not None
        name, checksum = copy.fetch.block_hashes[place], copy.fetch.checksums[place]
        assert isinstance(name, bytes)

        def job() -> Report:
            began_s = time.monotonic()
            content: bytearray | Trouble
            try:
                content = disk.read(name, checksum)
            except CorruptBlock:
                content = Trouble.CORRUPT
            except Exception:
                content = Trouble.FAILED
            seconds = time.monotonic() - began_s

            def report() -> None:
                copy.came[place] = content
                if not isinstance(content, Trouble):
                    copy.took(Tier.DISK, len(content), seconds)

            return report

        self._background.read(job)

    def _ask(self, copy: _Copy, peer: str) -> None:
        """Everything that is to come from the peer, in one question."""
        assert self._peers is not None
        fetch, background = copy.fetch, self._background
        places = [place for place, tier in enumerate(fetch.plan.sources) if tier is Tier.PEER]
        call = copy.call = self._peers.call(peer, fetch, copy.load.loader)

        def report(place: int, content: bytearray | Trouble, seconds: float) -> None:
            copy.came[place] = content
            if not isinstance(content, Trouble):
                copy.took(Tier.PEER, len(content), seconds)

        def job() -> Report:
            missing, since_s = iter(places), time.monotonic()
            trouble = Trouble.FAILED
            try:
                for _, content in call.blocks():
                    now_s = time.monotonic()
                    background.tell(partial(report, next(missing), content, now_s - since_s))
                    since_s = now_s
            except Stopped as stopped:
                trouble = stopped.trouble
            except Exception:
                log.exception("asking peer %s failed", peer)
            place = next(missing, None)
            return (lambda: None) if place is None else partial(report, place, trouble, 0.0)

        background.call(job)

    def _write(
        self,
        block_hash: BlockHash,
        block: torch.Tensor,
        done: Callable[[int, float], list[Order]],
        failed: Callable[[float], list[Order]],
    ) -> None:
        disk = self._disk
        assert disk is not None and isinstance(block_hash, bytes)
        self._writes += 1

        def job() -> Report:
            try:
                checksum = disk.write(block_hash, self._kv.to_bytes(block))
            except Exception:
                return lambda: self._written(failed(time.monotonic()))
            return lambda: self._written(done(checksum, time.monotonic()))

        self._background.write(job)

    def _keep_budget(self) -> None:
        """On its way before the blocks that it is about: a crash in between loses budget, never gains it."""
        budget, disk = self._budget, self._disk
        record = budget.due(time.monotonic(), time.time()) if budget is not None else None
        if budget is None or disk is None or record is None:
            return

        def job() -> Report:
            try:
                disk.keep_budget(record)
            except Exception:
                return budget.not_kept
            return lambda: None

        self._background.write(job)

    def _written(self, orders: list[Order]) -> None:
        self._writes -= 1
        self.carry_out(orders)

    def _delete(self, block_hash: BlockHash) -> None:
        disk = self._disk
        assert disk is not None and isinstance(block_hash, bytes)

        def job() -> Report:
            try:
                disk.delete(block_hash)
            except Exception:
                return lambda: None  # it takes room; a later start deletes or finds it
            return lambda: None

        self._background.write(job)
