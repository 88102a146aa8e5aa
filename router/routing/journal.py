"""What this router has to tell the others: events since it last did, and what is outstanding.

The fleet writes, whoever carries the news takes. Nothing here grows without bound: what is not taken in time
is dropped and counted, and the next thing to tell is then a ``statement``, the whole of what is outstanding.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from router.routing.exact_index import ExactIndex
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.peer_events import (
    CacheLost,
    FirstTokenCame,
    PeerEvent,
    PrefixesAsked,
    PromptCount,
    PromptStored,
    ReplicaDrained,
    ReplicaFailed,
    Reply,
    WorkHeld,
    WorkOver,
    WorkSent,
)
from router.routing.prompt_blocks import Prompt
from router.routing.recent_prompts import RecentPrompts, stored
from router.routing.replica_state import ReplicaState

MAX_EVENTS = 20_000
MAX_KEYS = 4_096
"""Of a longer prompt so many blocks are told."""
MISSED_PROMPTS = 2_000
"""After an interruption the others are told of so many of the prompts that were sent meanwhile."""


class Journal:
    """Owned by the fleet. Numbers requests from 1."""

    __slots__ = (
        "_deadlines",
        "_decoding",
        "_events",
        "_exact",
        "_last",
        "_missed",
        "_outstanding",
        "_recent",
        "dropped",
        "router",
        "wake",
    )

    def __init__(self, router: str, exact: ExactIndex) -> None:
        """``router``: this router's name among them all. ``exact`` knows how replicas name blocks."""
        self.router = router
        self._exact = exact
        self.wake: Callable[[], None] = lambda: None
        """Called when there is news again."""
        self.dropped = 0
        """Events that were never taken."""
        self._events: list[PeerEvent] = []
        self._outstanding: dict[int, WorkSent | WorkHeld] = {}
        self._deadlines: dict[int, float] = {}
        self._decoding: set[int] = set()
        self._missed: deque[PromptStored] = deque(maxlen=MISSED_PROMPTS)
        self._recent = RecentPrompts()
        self._last = 0

    # --- from the fleet -------------------------------------------------------------------------

    def held(self, held: Held, replica: ReplicaState, now: float) -> None:
        """A request waits."""
        held.number = number = self._next()
        keys, naming = _blocks(held.prompt, replica, self._exact)
        event = WorkHeld(
            number,
            replica.name,
            held.prefill_s,
            held.deadline - now,
            held.decision.matched_tokens,
            keys,
            naming,
            held.tenant,
            held.priority,
            held.new_tokens,
        )
        self._outstanding[number] = event
        self._deadlines[number] = held.deadline
        self._tell(event)

    def hold_ended(self, held: Held, *, withdrawn: bool = False) -> None:
        """It waits no more. ``withdrawn``: and does not go to that replica."""
        self._outstanding.pop(held.number, None)
        self._deadlines.pop(held.number, None)
        self._tell(WorkOver(held.number, not withdrawn))

    def sent(self, flight: InFlight, *, arrived: bool) -> None:
        """A request was sent. ``arrived``: for the first time."""
        flight.number = number = self._next()
        booking, decision = flight.booking, flight.decision
        keys, naming = _blocks(flight.prompt, flight.replica, self._exact)
        event = WorkSent(
            number,
            flight.replica.name,
            decision.prefill_s,
            decision.matched_tokens,
            booking.new_tokens,
            booking.expected_output_tokens,
            decision.prefill_s + decision.saved_s if arrived else None,
            keys,
            naming,
            "" if flight.prompt.tenant is None else flight.prompt.tenant.name,
        )
        self._outstanding[number] = event
        self._tell(event)

    def first_token(self, flight: InFlight, *, seen: bool = True) -> None:
        """Its prefill is over."""
        self._decoding.add(flight.number)
        self._tell(FirstTokenCame(flight.number, seen))

    def over(
        self,
        flight: InFlight,
        *,
        computed: bool,
        reply: Reply | None = None,
        count: PromptCount | None = None,
    ) -> None:
        """It ended."""
        self._outstanding.pop(flight.number, None)
        self._decoding.discard(flight.number)
        self._tell(WorkOver(flight.number, computed, reply, count))

    def prefixes_asked(self, keys: Sequence[int], prefill_s: float) -> None:
        """A request begins with prefixes that may be hot."""
        self._tell(PrefixesAsked(keys, prefill_s))

    def replica_failed(self, replica: ReplicaState) -> None:
        """The replica was ejected."""
        self._tell(ReplicaFailed(replica.name))

    def cache_lost(self, replica: ReplicaState) -> None:
        """The replica lost its cache."""
        self._tell(CacheLost(replica.name))

    def drained(self, replica: ReplicaState) -> None:
        """An operator's order."""
        self._tell(ReplicaDrained(replica.name, replica.draining, replica.drain_version))

    def _next(self) -> int:
        self._last += 1
        return self._last

    def _tell(self, event: PeerEvent) -> None:
        events = self._events
        if len(events) >= MAX_EVENTS:
            self.discard()
        events.append(event)
        if len(events) == 1:
            self.wake()

    # --- for the carrier ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._events)

    @property
    def outstanding(self) -> int:
        """Requests that are held or in flight."""
        return len(self._outstanding)

    def take(self) -> list[PeerEvent]:
        """The news since the last time, oldest first."""
        events, self._events = self._events, []
        return events

    def told(self, batch: int, events: Sequence[PeerEvent]) -> None:
        """These were taken and went into the batch of that number; numbers rise."""
        self._recent.told(batch, events)

    def discard(self) -> None:
        """Nobody can be told now. What should be known of prompts is kept, as far as there is room."""
        self.lost(self._events)
        self._events.clear()

    def lost(self, events: Sequence[PeerEvent]) -> None:
        """These were taken, and may have reached nobody."""
        self.dropped += sum(type(event) is not PromptStored for event in events)
        self._keep_prompts(events)

    def _keep_prompts(self, events: Iterable[PeerEvent]) -> None:
        self._missed.extend(
            stored(event) for event in events if isinstance(event, WorkSent | PromptStored) and event.keys
        )

    def statement(
        self, replicas: Iterable[ReplicaState], now: float, again: tuple[int, int] | None = None
    ) -> tuple[list[int], list[PeerEvent]]:
        """The numbers of all requests outstanding, and what is to be told of them, once more for some.

        With prompts that nobody was told of, those of the batches ``again`` (first and last), operators'
        orders, and whatever was not taken yet. O(outstanding).
        """
        told: list[PeerEvent] = [
            ReplicaDrained(replica.name, replica.draining, replica.drain_version)
            for replica in replicas
            if replica.drain_version
        ]
        self._keep_prompts(self._events)
        self._events.clear()
        if again is not None:
            told += self._recent.of_batches(*again)
        told += self._missed
        self._missed.clear()
        numbers = list(self._outstanding)
        for number, event in self._outstanding.items():
            if type(event) is WorkHeld:
                told.append(replace(event, deadline_in_s=self._deadlines[number] - now))
            elif type(event) is WorkSent:
                decoding = number in self._decoding
                told.append(replace(event, cold_prefill_s=None, keys=() if decoding else event.keys))
                if decoding:
                    told.append(FirstTokenCame(number, seen=False))
        return numbers, told


def _blocks(prompt: Prompt, replica: ReplicaState, exact: ExactIndex) -> tuple[Sequence[int], str | None]:
    """The prompt's keys as ``replica`` knows them, and in whose naming they are."""
    if prompt.chains is None:
        return list(prompt.keys), None
    naming = exact.naming(replica.index)
    keys = prompt.chains.get(naming, ())
    return keys if len(keys) <= MAX_KEYS else keys[:MAX_KEYS], naming.described()
