"""Who the other routers are, and whether everything they told has arrived. No I/O: batches and times come in.

Each router numbers its batches. A number left out is a gap: the router is asked for a statement, the whole
of what it has outstanding, which takes the place of what is known of it, and for the prompts of the batches
that are missing. A router that is not heard for the length of the lease is gone, and what it had outstanding
with it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from router.routing.peers import Peers
from router.state.wire import EVERYBODY, Batch

REMEMBERED_OWN = 1_024
"""Own batches that are waited for, to measure how long they take."""

ASK_AGAIN_S = 0.25
ASK_FOR_PROMPTS = 3
"""Who states what it has so often without the prompts it was asked for is of an earlier version."""
REMEMBERED_GONE = 256
"""Routers that were not heard for their lease and may come back."""


def _hull(one: tuple[int, int] | None, other: tuple[int, int]) -> tuple[int, int]:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


@dataclass(slots=True)
class Wanted:
    """What is to be asked of a router: its statement, and the prompts of some batches."""

    at: float
    """When to ask, or to ask again."""
    lacks: tuple[int, int] | None = None
    """First and last of the batches that did not arrive."""
    asked: bool = False
    without: int = 0
    """Statements since then without the prompts. (How often it was asked says nothing: that may be lost.)"""

    def answered(self, again: tuple[int, int] | None) -> bool:
        """A statement with the prompts of the batches ``again`` came: is it all that was wanted?"""
        if self.lacks is None:
            return True
        if again is not None and again[0] <= self.lacks[0] and self.lacks[1] <= again[1]:
            return True
        self.without += self.asked
        return self.without >= ASK_FOR_PROMPTS


@dataclass(slots=True)
class Peer:
    """Another router, as far as it was heard."""

    router: str
    heard_at: float
    last_number: int = 0
    gaps: int = 0
    """How often batches of it were missing."""


class PeerTracker:
    """Passes on what others tell to ``peers``; says who is there, what to ask for and what is asked."""

    __slots__ = (
        "_gone",
        "_lease_s",
        "_own_sent",
        "_peers",
        "_router",
        "_wanted",
        "asked",
        "batches",
        "events",
        "gaps",
        "lacked",
        "lag_s",
        "late",
        "live",
        "to_warm",
    )

    def __init__(self, router: str, peers: Peers, lease_s: float) -> None:
        """``router``: this one's name."""
        self._router = router
        self._peers = peers
        self._lease_s = lease_s
        self._own_sent: dict[int, float] = {}
        self.live: dict[str, Peer] = {}
        """By name: who was heard within the lease."""
        self._gone: dict[str, int] = {}
        """The last number of routers that were lost without a word."""
        self._wanted: dict[str, Wanted] = {}
        self.asked = False
        """This router's statement is wanted; whoever makes it sets this back."""
        self.lacked: tuple[int, int] | None = None
        """The first and the last of own batches that some did not get: that statement has their prompts."""
        self.to_warm: set[str] = set()
        """Routers for whom this one is asked to write down what it knows; whoever does takes them out."""
        self.lag_s: float | None = None
        """From sending until everybody can have it: measured on the last own batch that came back."""
        self.batches = 0
        """Of other routers."""
        self.events = 0
        self.gaps = 0
        self.late = 0
        """Batches that came when a later one had been seen: not used."""

    def sent(self, number: int, now: float) -> None:
        """An own batch is on its way; it will come back like those of others."""
        if len(self._own_sent) >= REMEMBERED_OWN:
            self._own_sent.clear()
        self._own_sent[number] = now

    def received(self, batch: Batch, now: float) -> None:
        """A batch came in, in the order of the stream."""
        if batch.router == self._router:
            at = self._own_sent.pop(batch.number, None)
            if at is not None:
                self.lag_s = now - at
            return
        self.batches += 1
        peer = self.live.get(batch.router)
        if batch.leaving:
            self._lost(batch.router, now)
            return
        if peer is None:
            heard_before = self._gone.pop(batch.router, batch.number - 1)
            peer = self.live[batch.router] = Peer(batch.router, now, heard_before)
            if batch.outstanding is None:
                self._want(batch.router, now)  # what it had outstanding before is not known
        if batch.number <= peer.last_number:
            self.late += 1
            return
        if batch.number > peer.last_number + 1:
            if batch.outstanding is None:
                peer.gaps += 1
                self.gaps += 1
            self._want(batch.router, now, (peer.last_number + 1, batch.number - 1))
        peer.last_number, peer.heard_at = batch.number, now
        self._take(batch, now)

    def _take(self, batch: Batch, now: float) -> None:
        self.events += len(batch.events)
        if batch.outstanding is not None:
            wanted = self._wanted.get(batch.router)
            if wanted is not None and wanted.answered(batch.again):
                del self._wanted[batch.router]
            self._peers.stated(batch.router, batch.outstanding, now)
        if batch.events:
            self._peers.told(batch.router, batch.events, now)
        if self._router in batch.ask or EVERYBODY in batch.ask:
            self.asked = True
        lacked = batch.lacks.get(self._router)
        if lacked is not None:
            self.asked, self.lacked = True, _hull(self.lacked, lacked)
        if batch.warm_from == self._router:
            self.to_warm.add(batch.router)

    def _want(self, router: str, now: float, lacks: tuple[int, int] | None = None) -> None:
        wanted = self._wanted.setdefault(router, Wanted(now))
        if lacks is not None:
            wanted.lacks = _hull(wanted.lacks, lacks)

    def wants(self, now: float) -> bool:
        """Something of some router is missing, and it is time to ask."""
        return any(wanted.at <= now for wanted in self._wanted.values())

    def ask(self, now: float) -> tuple[list[str], dict[str, tuple[int, int]]]:
        """Routers whose statement is wanted, and of which batches the prompts are; until they come."""
        due = {router: wanted for router, wanted in self._wanted.items() if wanted.at <= now}
        for wanted in due.values():
            wanted.at, wanted.asked = now + ASK_AGAIN_S, True
        return list(due), {router: one.lacks for router, one in due.items() if one.lacks is not None}

    def expire(self, now: float) -> list[str]:
        """Routers that are gone by now, each told once."""
        gone = [peer.router for peer in self.live.values() if now - peer.heard_at > self._lease_s]
        for router in gone:
            if len(self._gone) >= REMEMBERED_GONE:
                del self._gone[next(iter(self._gone))]
            self._gone[router] = self.live[router].last_number
            self._lost(router, now)
        return gone

    def _lost(self, router: str, now: float) -> None:
        self.live.pop(router, None)
        self._wanted.pop(router, None)
        self.to_warm.discard(router)
        self._peers.gone(router, now)

    def eldest(self, but: Collection[str] = ()) -> str | None:
        """The peer that has told most: it should know most. ``None``: there is no other, ``but`` those."""
        known = [peer for peer in self.live.values() if peer.router not in but]
        return max(known, key=lambda peer: peer.last_number).router if known else None
