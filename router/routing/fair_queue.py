"""Requests held for one replica, fair between tenants: deficit round robin over their uncached tokens.

A tenant's requests stand in a lane of their own: lower priority numbers first, and among equals as
``hold_queue`` has it. Lanes take turns. With each turn a lane may send ``QUANTUM_TOKENS`` times its weight
more, and sends while that suffices for the next of its requests; what is left is kept for its next turn, and
lost when its last request has gone (Shreedhar and Varghese, 1995). So over any time two lanes that never ran
empty differ, in tokens by weight, by no more than a turn and their longest prompts, and nobody starves. A
lane alone, and so everybody where tenants are not told apart, goes exactly as ``hold_queue`` says.

Routers that share their state charge one another's requests as they hear of them, and so mostly agree on
whose turn it is; where they do not, who goes early pays in later turns.

>>> from router.routing.prompt_blocks import Prompt
>>> from router.routing.tenant import Tenant
>>> queue = FairQueue()
>>> for name, tokens in ("a", 400), ("a", 400), ("a", 400), ("b", 700), ("b", 300):
...     prompt = Prompt(keys=(), units=0)
...     prompt.tenant = Tenant(name, weight=2.0 if name == "b" else 1.0)
...     queue.add(Held(prompt, None, tokens / 1e4, 9.0, new_tokens=tokens))
>>> sent = []
>>> while (held := queue.next(0.0)) is not None:
...     queue.sent(held)
...     sent.append((held.tenant, held.new_tokens))
>>> sent                                                     # turns of 512 and 1,024 tokens
[('a', 400), ('b', 300), ('b', 700), ('a', 400), ('a', 400)]
"""

from collections.abc import Sequence
from math import ceil

from router.routing.hold_queue import Held, HoldQueue
from router.routing.prompt_blocks import Prompt

QUANTUM_TOKENS = 512.0
"""Of weight 1, with each turn. Smaller takes turns more finely; it costs nothing, empty turns are skipped."""


class Lane:
    """One tenant's requests."""

    __slots__ = ("_levels", "count", "deficit", "own", "prefill_s", "tenant", "weight")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.weight = 1.0
        self.deficit = 0.0
        """Tokens it may still send in its turn; kept while it waits for the next one."""
        self.count = 0
        self.own = 0
        self.prefill_s = 0.0
        self._levels: list[tuple[int, HoldQueue]] = []
        """By priority, none of them empty."""

    def level(self, priority: int) -> HoldQueue | None:
        """Those of one priority, if there are any."""
        return next((level for one, level in self._levels if one == priority), None)

    def add(self, held: Held) -> None:
        """One more waits."""
        level = self.level(held.priority)
        if level is None:
            level = HoldQueue()
            self._levels.append((held.priority, level))
            self._levels.sort(key=_priority)
        level.add(held)
        self.weight = held.weight
        self.count += 1
        self.own += held.own
        self.prefill_s += held.prefill_s

    def remove(self, held: Held) -> None:
        """``held`` leaves. Raises ``ValueError`` if it does not wait here."""
        level = self.level(held.priority)
        if level is None:
            raise ValueError("it does not wait here")
        level.remove(held)
        if not len(level):
            self._levels = [one for one in self._levels if len(one[1])]
        self.count -= 1
        self.own -= held.own
        self.prefill_s = self.prefill_s - held.prefill_s if self.count else 0.0

    def next(self, now: float) -> Held | None:
        """Who goes next."""
        return self._levels[0][1].next(now) if self._levels else None

    def next_own(self, now: float) -> Held | None:
        """Who goes next of those this router holds."""
        for _, level in self._levels:
            if level.own:
                return level.next_own(now)
        return None

    def counted_on(self, keys: Sequence[int]) -> list[Held]:
        """Those that have yet to compute a block of a prompt with ``keys``."""
        found: list[Held] = []
        for _, level in self._levels:
            found += level.counted_on(keys)
        return found

    def ahead_s(self, rank_s: float, priority: int | None) -> float:
        """Prefill seconds before a newcomer: of lower rank, and of better ``priority`` if that counts."""
        ahead_s = 0.0
        for one, level in self._levels:
            if priority is None or one == priority:
                ahead_s += level.ahead_s(rank_s)
            elif one < priority:
                ahead_s += level.prefill_s
        return ahead_s

    def behind(self, rank_s: float, priority: int | None) -> int:
        """How many a newcomer would go before, likewise."""
        behind = 0
        for one, level in self._levels:
            if priority is None or one == priority:
                behind += level.behind(rank_s)
            elif one > priority:
                behind += len(level)
        return behind

    def turns(self, tokens: int) -> int:
        """How many more turns it takes until ``tokens`` may be sent."""
        missing = tokens - self.deficit
        return ceil(missing / (QUANTUM_TOKENS * self.weight)) if missing > 0.0 else 0

    def granted(self, turns: int) -> None:
        """So many turns came."""
        self.deficit += turns * QUANTUM_TOKENS * self.weight


class FairQueue:
    """Requests held for one replica. Prefill seconds are those predicted when they were held."""

    __slots__ = ("_by_tenant", "_ring", "count", "new_tokens", "own", "prefill_s")

    def __init__(self) -> None:
        self._ring: list[Lane] = []
        """Lanes that are not empty; the first has its turn."""
        self._by_tenant: dict[str, Lane] = {}
        self.count = 0
        """How many wait here."""
        self.prefill_s = 0.0
        """Of all that wait here."""
        self.new_tokens = 0
        """Likewise: uncached tokens of their prompts."""
        self.own = 0
        """How many of them this router holds."""

    def __len__(self) -> int:
        return self.count

    def add(self, held: Held) -> None:
        """One more waits. A lane that was empty has its turn after the others."""
        lane = self._by_tenant.get(held.tenant)
        if lane is None:
            lane = self._by_tenant[held.tenant] = Lane(held.tenant)
            self._ring.append(lane)
            lane.add(held)
            if len(self._ring) == 1:
                lane.granted(1)
        else:
            lane.add(held)
        self.count += 1
        self.prefill_s += held.prefill_s
        self.new_tokens += held.new_tokens
        self.own += held.own

    def remove(self, held: Held) -> None:
        """``held`` leaves without being sent. Raises ``ValueError`` if it does not wait here."""
        lane = self._by_tenant.get(held.tenant)
        if lane is None:
            raise ValueError("it does not wait here")
        lane.remove(held)
        if not lane.count:
            had_turn = self._ring[0] is lane
            self._ring.remove(lane)
            del self._by_tenant[held.tenant]
            if had_turn and self._ring:
                self._ring[0].granted(1)
        self.count -= 1
        self.prefill_s = self.prefill_s - held.prefill_s if self.count else 0.0
        self.new_tokens -= held.new_tokens
        self.own -= held.own

    def sent(self, held: Held) -> None:
        """``held`` goes to the replica: its lane pays. Raises ``ValueError`` if it does not wait here."""
        if len(self._ring) > 1:
            self._pay(self._by_tenant[held.tenant], held.new_tokens)
        self.remove(held)

    def _pay(self, lane: Lane, tokens: int) -> None:
        """The turns pass that ``lane`` needs; then it has its turn and pays."""
        ring = self._ring
        place, turns = ring.index(lane), lane.turns(tokens)
        if place == 0:
            for one in ring:
                one.granted(turns)
        else:
            turns = max(1, turns)
            for at, one in enumerate(ring):
                one.granted(turns if 0 < at <= place else turns - 1)
            self._ring = ring[place:] + ring[:place]
        lane.deficit -= tokens

    @property
    def parted(self) -> bool:
        """Several tenants wait here."""
        return len(self._ring) > 1

    # --- whose turn it is -----------------------------------------------------------------------

    def next(self, now: float) -> Held | None:
        """Who goes next; the queue stays as it is."""
        ring = self._ring
        if not ring:
            return None
        return ring[0].next(now) if len(ring) == 1 else self._chosen([lane.next(now) for lane in ring])

    def next_own(self, now: float) -> Held | None:
        """Who goes next of those this router holds. O(others') requests before it."""
        if not self.own:
            return None
        return self._chosen([lane.next_own(now) for lane in self._ring])

    def _chosen(self, firsts: list[Held | None]) -> Held | None:
        """Whose turn comes first of ``firsts``, one per lane."""
        best: Held | None = None
        least = (0, 0)
        for place, (lane, held) in enumerate(zip(self._ring, firsts, strict=True)):
            if held is None:
                continue
            turns = lane.turns(held.new_tokens)
            # The first lane has its turn now; any more it needs come after the others'.
            rank = (turns, len(firsts) if turns else 0) if place == 0 else (max(1, turns), place)
            if best is None or rank < least:
                best, least = held, rank
        return best

    # --- for a newcomer -------------------------------------------------------------------------

    def goes_before(self, first: Held, prompt: Prompt, prefill_s: float, now: float) -> bool:
        """A newcomer would go before ``first``, who is next, and so before everybody."""
        if len(self._ring) > 1 or _tenant(prompt) != first.tenant:
            return False
        if prompt.priority != first.priority:
            return prompt.priority < first.priority
        return now < first.overdue_at and self.rank_s(prefill_s, prompt) < first.rank_s

    def counted_on(self, prompt: Prompt) -> list[Held]:
        """Those of its tenant that have yet to compute a block of ``prompt``, which counts on it."""
        lane = self._by_tenant.get(_tenant(prompt))
        return [] if lane is None else lane.counted_on(prompt.keys)

    def rank_s(self, prefill_s: float, prompt: Prompt | None) -> float:
        """The rank of a newcomer of ``prefill_s``: after those of its tenant and priority that are to compute
        what it counts on; else its prefill."""
        if prompt is None or not prompt.keys:
            return prefill_s
        lane = self._by_tenant.get(_tenant(prompt))
        level = None if lane is None else lane.level(prompt.priority)
        return prefill_s if level is None else level.rank_s(prefill_s, prompt.keys)

    def ahead_s(self, rank_s: float, prompt: Prompt | None = None) -> float:
        """Prefill seconds that go before a newcomer of that rank, if other lanes were of its tenant.

        What goes before it by turns is no more, and says nothing of the work that a replica has: by that,
        tenants were parted among replicas, and each replica's turns were other tenants' (docs/log.md).
        """
        tenant, ahead_s = _tenant(prompt), 0.0
        for lane in self._ring:
            ahead_s += lane.ahead_s(rank_s, _priority_in(lane, tenant, prompt))
        return ahead_s

    def behind(self, rank_s: float, prompt: Prompt | None = None) -> int:
        """How many a newcomer of that rank would go before, likewise."""
        tenant, behind = _tenant(prompt), 0
        for lane in self._ring:
            behind += lane.behind(rank_s, _priority_in(lane, tenant, prompt))
        return behind

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if lanes and counts disagree. O(lanes)."""
        assert {lane.tenant: lane for lane in self._ring} == self._by_tenant, "ring"
        assert self.count == sum([lane.count for lane in self._ring]), "count"
        assert self.own == sum([lane.own for lane in self._ring]), "own"
        assert self.count or not self.new_tokens, "tokens of nobody"
        assert all(lane.count for lane in self._ring), "an empty lane"


def _priority(level: tuple[int, HoldQueue]) -> int:
    return level[0]


def _tenant(prompt: Prompt | None) -> str:
    return "" if prompt is None or prompt.tenant is None else prompt.tenant.name


def _priority_in(lane: Lane, tenant: str, prompt: Prompt | None) -> int | None:
    """The newcomer's priority in ``lane``; ``None``: there it has none."""
    return None if prompt is None or lane.tenant != tenant else prompt.priority
