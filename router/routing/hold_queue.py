"""Late binding: requests wait in the router, in order of work, instead of in an engine's queue.

An engine works its queue first come, first served. Held here, the shortest prefill goes first, except that a
request waiting beyond its deadline goes before all others, oldest deadline first, so nobody starves.

What a request counts on may be what another one here has yet to compute: it goes after that one, however
short it is alone. The two are one piece of work that ends two waits, so the one that computes first is ranked
by their mean, if that is less (Smith's ratio): a prefix that many wait for goes early.

Routers that share their state keep one queue together: each sees the others' requests in it, and sends its
own when they are first. Equals go by router and number, so that all see the same order.

>>> queue = HoldQueue()
>>> for prefill, deadline in ((0.9, 9.0), (0.1, 9.0), (0.5, 2.0)):
...     queue.add(Held(None, None, prefill, deadline))
>>> queue.ahead_s(0.5), queue.behind(0.5)          # for a newcomer of 0.5 s: 0.1 + 0.5 ahead, one behind
(0.6, 1)
>>> [queue.take(now).prefill_s for now in (1.0, 3.0, 3.0)]
[0.1, 0.5, 0.9]

A prompt of 2 s, and two questions of 0.1 s after a document of 3 s that is held, too. The document ends three
waits in 3.2 s, so it goes first::

    rank of the document    3.0, with a question (3.0 + 0.1) / 2 = 1.55, with both (3.0 + 0.2) / 3 = 1.07

>>> from router.routing.prompt_blocks import Prompt
>>> def prompt(*keys): return Prompt(keys=keys, units=0)
>>> queue = HoldQueue()
>>> queue.add(Held(prompt(1, 2), None, 3.0, 9.0))
>>> queue.add(Held(prompt(8, 9), None, 2.0, 9.0))
>>> for question in (3, 4):
...     queue.add(Held(prompt(1, 2, question), None, 0.1, 9.0, opens=2))
>>> [queue.take(0.0).prefill_s for _ in range(4)]
[3.0, 0.1, 0.1, 2.0]
"""

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence
from math import inf, nextafter
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.routing.exact_index import Expectation
    from router.routing.in_flight import InFlight
    from router.routing.tenant import Tenant

_rank = attrgetter("rank_s")
_order = attrgetter("rank_s", "router", "number")
_overdue = attrgetter("overdue_at", "rank_s")


class Held:
    """One request that waits in the router for its replica."""

    __slots__ = (
        "context",
        "deadline",
        "decision",
        "expectation",
        "first_key",
        "flight",
        "new_tokens",
        "number",
        "opens",
        "overdue_at",
        "own",
        "policy",
        "prefill_s",
        "priority",
        "prompt",
        "rank_s",
        "router",
        "session",
        "tenant",
        "together",
        "together_s",
        "two_steps",
        "weight",
        "within",
    )

    def __init__(
        self,
        prompt: Any,
        decision: Any,
        prefill_s: float,
        deadline: float,
        session: str | None = None,
        context: Any = None,
        *,
        router: str = "",
        number: int = 0,
        own: bool = True,
        new_tokens: int = 1,
        opens: int = 0,
    ) -> None:
        self.prompt = prompt
        tenant: Tenant | None = None if prompt is None else prompt.tenant
        self.tenant = "" if tenant is None else tenant.name
        """In whose lane it waits (``fair_queue``); "" where tenants are not told apart."""
        self.weight = 1.0 if tenant is None else tenant.weight
        self.priority: int = 0 if prompt is None else prompt.priority
        self.new_tokens = new_tokens
        """Of its prompt, those that are not cached where it waits."""
        self.decision = decision
        self.prefill_s = prefill_s
        self.deadline = deadline
        """From then on it goes before all that are not overdue."""
        self.opens = opens
        """Leading blocks of its prompt that it counts on; the next one, ``first_key``, it computes."""
        self.first_key: int | None = None
        self.rank_s = prefill_s
        """The least goes first. The queue's, as all that follows."""
        self.overdue_at = deadline
        """Its deadline, or a later one of those it counts on."""
        self.together = 1
        self.together_s = prefill_s
        """It and the requests that make it go earlier: how many, and all their prefill."""
        self.session = session
        self.context = context
        """The caller's, untouched."""
        self.expectation: Expectation | None = None
        """While it waits: what it will have stored, if its prompt was read token by token."""
        self.router = router
        self.number = number
        """In that router's journal, if there is one."""
        self.two_steps = False
        """It can be prefilled apart."""
        self.policy: str | None = None
        """The one it asked for, if it did."""
        self.within: Collection[int] | None = None
        """The replicas that may have it; ``None``: any."""
        self.own = own
        """False: another router holds it, which alone may send it."""
        self.flight: InFlight | None = None
        """Set when it was sent; still ``None`` in the outbox when no replica is left for it."""

    @property
    def alone_s(self) -> float:
        """Its rank if it counted on nobody here."""
        return min(self.prefill_s, self.together_s / self.together)

    @property
    def delayed(self) -> bool:
        """It goes later for one it counts on."""
        return self.rank_s > self.alone_s or self.overdue_at > self.deadline


class HoldQueue:
    """Requests held for one replica. Prefill seconds are those predicted when they were held."""

    __slots__ = ("_by_deadline", "_by_rank", "_openers", "own", "prefill_s")

    def __init__(self) -> None:
        self._by_rank: list[Held] = []
        self._by_deadline: list[Held] = []
        self._openers: dict[int, list[Held]] = {}
        """By the first block that they compute."""
        self.prefill_s = 0.0
        """Of all that wait here."""
        self.own = 0
        """How many of them this router holds."""

    def __len__(self) -> int:
        return len(self._by_rank)

    def add(self, held: Held) -> None:
        """One more waits. Those it counts on may go earlier now."""
        held.together_s = prefill_s = held.prefill_s
        held.together = 1
        keys = _keys(held)
        held.first_key = keys[held.opens] if held.opens < len(keys) else None
        for one in self.counted_on(keys):
            if prefill_s < one.rank_s and one.opens < held.opens:
                one.together += 1
                one.together_s += prefill_s
                self._take_out(one)
                self._put_in(one)
        self._put_in(held)
        if held.first_key is not None:
            self._openers.setdefault(held.first_key, []).append(held)
        self.prefill_s += prefill_s
        self.own += held.own

    def _put_in(self, held: Held) -> None:
        """Where its place is now."""
        self._rank(held)
        insort(self._by_rank, held, key=_order)
        insort(self._by_deadline, held, key=_overdue)

    def _rank(self, held: Held) -> None:
        rank_s, overdue_at = held.alone_s, held.deadline
        for one in self.counted_on(_keys(held)):
            if one.opens < held.opens:
                rank_s = max(rank_s, nextafter(one.rank_s, inf))
                overdue_at = max(overdue_at, one.overdue_at)
        held.rank_s, held.overdue_at = rank_s, overdue_at

    def _take_out(self, held: Held) -> None:
        self._by_rank.remove(held)
        self._by_deadline.remove(held)

    def counted_on(self, keys: Sequence[int]) -> list[Held]:
        """Those that have yet to compute a block which a prompt with ``keys`` has, too; as they go.

        What is held is believed to be cached, so whoever has that block in its prompt counts on it. Cost:
        O(blocks of the prompt), or O(held) if that is less.
        """
        openers, count = self._openers, len(keys)
        found: list[Held] = []
        if len(openers) < count:
            for key, group in openers.items():
                opens = group[0].opens  # a key names its place, too
                if opens < count and keys[opens] == key:
                    found += group
        elif openers:
            for key in keys:
                if (group_of := openers.get(key)) is not None:
                    found += group_of
        if len(found) > 1:
            found.sort(key=_order)
        return found

    def rank_s(self, prefill_s: float, keys: Sequence[int]) -> float:
        """The rank of a newcomer of ``prefill_s``: it goes before those of a higher one."""
        found = self.counted_on(keys)
        return max(prefill_s, found[-1].rank_s) if found else prefill_s

    def ahead_s(self, rank_s: float) -> float:
        """Prefill seconds that go before a newcomer of that rank."""
        ahead_s = 0.0
        for held in self._by_rank:
            if held.rank_s > rank_s:
                break
            ahead_s += held.prefill_s
        return ahead_s

    def behind(self, rank_s: float) -> int:
        """How many a newcomer of that rank would go before."""
        return len(self._by_rank) - bisect_right(self._by_rank, rank_s, key=_rank)

    def next(self, now: float) -> Held | None:
        """Who goes next; the queue stays as it is."""
        if not self._by_rank:
            return None
        first = self._by_deadline[0]
        return first if first.overdue_at <= now else self._by_rank[0]

    def next_own(self, now: float) -> Held | None:
        """Who goes next of those this router holds. O(others') requests before it."""
        if not self.own:
            return None
        first = next(held for held in self._by_deadline if held.own)
        if first.overdue_at <= now:
            return first
        return next(held for held in self._by_rank if held.own)

    def take(self, now: float) -> Held:
        """Who goes next, out of the queue. Raises ``IndexError`` when nobody waits."""
        held = self.next(now)
        if held is None:
            raise IndexError("nobody is held")
        self.remove(held)
        return held

    def remove(self, held: Held) -> None:
        """``held`` leaves. Raises ``ValueError`` if it does not wait here."""
        self._take_out(held)
        self.prefill_s = self.prefill_s - held.prefill_s if self._by_rank else 0.0
        self.own -= held.own
        opens, key = held.opens, held.first_key
        if key is None:
            return
        group = self._openers[key]
        group.remove(held)
        if not group:
            del self._openers[key]
        if held.together > 1:
            for one in self._by_rank:  # in this order those that others count on come first
                if one.opens > opens and one.delayed and _keys(one)[opens] == key:
                    self._rank(one)
            self._by_rank.sort(key=_order)
            self._by_deadline.sort(key=_overdue)


def _keys(held: Held) -> Sequence[int]:
    return () if held.prompt is None else held.prompt.keys
