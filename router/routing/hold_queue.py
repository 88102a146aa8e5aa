"""Late binding: requests wait in the router, in order of work, instead of in an engine's queue.

An engine works its queue first come, first served. Held here, the shortest prefill goes first, except that a
request waiting beyond its deadline goes before all others, oldest deadline first, so nobody starves.

Routers that share their state keep one queue together: each sees the others' requests in it, and sends its
own when they are first. Equals go by router and number, so that all see the same order.

>>> queue = HoldQueue()
>>> for prefill, deadline in ((0.9, 9.0), (0.1, 9.0), (0.5, 2.0)):
...     queue.add(Held(None, None, prefill, deadline))
>>> queue.ahead_s(0.5), queue.behind(0.5)          # for a newcomer of 0.5 s: 0.1 + 0.5 ahead, one behind
(0.6, 1)
>>> [queue.take(now).prefill_s for now in (1.0, 3.0, 3.0)]
[0.1, 0.5, 0.9]
"""

from bisect import bisect_right, insort
from collections.abc import Collection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.routing.exact_index import Expectation
    from router.routing.in_flight import InFlight
    from router.routing.tenant import Tenant

_prefill = attrgetter("prefill_s")
_order = attrgetter("prefill_s", "router", "number")
_deadline = attrgetter("deadline")


class Held:
    """One request that waits in the router for its replica."""

    __slots__ = (
        "context",
        "deadline",
        "decision",
        "expectation",
        "flight",
        "new_tokens",
        "number",
        "own",
        "policy",
        "prefill_s",
        "priority",
        "prompt",
        "router",
        "session",
        "tenant",
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


class HoldQueue:
    """Requests held for one replica. Prefill seconds are those predicted when they were held."""

    __slots__ = ("_by_deadline", "_by_prefill", "own", "prefill_s")

    def __init__(self) -> None:
        self._by_prefill: list[Held] = []
        self._by_deadline: list[Held] = []
        self.prefill_s = 0.0
        """Of all that wait here."""
        self.own = 0
        """How many of them this router holds."""

    def __len__(self) -> int:
        return len(self._by_prefill)

    def add(self, held: Held) -> None:
        """One more waits."""
        insort(self._by_prefill, held, key=_order)
        insort(self._by_deadline, held, key=_deadline)
        self.prefill_s += held.prefill_s
        self.own += held.own

    def ahead_s(self, prefill_s: float) -> float:
        """Prefill seconds that go before a newcomer of ``prefill_s``."""
        stop = bisect_right(self._by_prefill, prefill_s, key=_prefill)
        return float(sum(map(_prefill, self._by_prefill[:stop])))

    def behind(self, prefill_s: float) -> int:
        """How many a newcomer of ``prefill_s`` would go before."""
        return len(self._by_prefill) - bisect_right(self._by_prefill, prefill_s, key=_prefill)

    def next(self, now: float) -> Held | None:
        """Who goes next; the queue stays as it is."""
        if not self._by_prefill:
            return None
        first = self._by_deadline[0]
        return first if first.deadline <= now else self._by_prefill[0]

    def next_own(self, now: float) -> Held | None:
        """Who goes next of those this router holds. O(others') requests before it."""
        if not self.own:
            return None
        first = next(held for held in self._by_deadline if held.own)
        if first.deadline <= now:
            return first
        return next(held for held in self._by_prefill if held.own)

    def take(self, now: float) -> Held:
        """Who goes next, out of the queue. Raises ``IndexError`` when nobody waits."""
        held = self.next(now)
        if held is None:
            raise IndexError("nobody is held")
        self.remove(held)
        return held

    def remove(self, held: Held) -> None:
        """``held`` leaves. Raises ``ValueError`` if it does not wait here."""
        self._by_prefill.remove(held)
        self._by_deadline.remove(held)
        self.prefill_s = self.prefill_s - held.prefill_s if self._by_prefill else 0.0
        self.own -= held.own
