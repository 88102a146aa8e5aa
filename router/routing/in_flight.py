"""One request on one replica, from dispatch to its last byte; and what the replica said it used."""

from dataclasses import dataclass

from router.routing.decision import Decision
from router.routing.exact_index import Expectation
from router.routing.ledger import Booking
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class Usage:
    """What a replica reported about a finished request; ``None`` is "not told"."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class InFlight:
    """Owned by the fleet, which alone changes it."""

    __slots__ = (
        "booking",
        "decision",
        "expectation",
        "first_token_at",
        "number",
        "prompt",
        "replica",
        "sent_at",
        "settled",
    )

    def __init__(
        self,
        prompt: Prompt,
        decision: Decision,
        replica: ReplicaState,
        booking: Booking,
        now: float,
        expectation: Expectation | None = None,
        settled: bool = False,
    ) -> None:
        self.prompt = prompt
        self.decision = decision
        self.replica = replica
        self.booking = booking
        self.sent_at = now
        self.first_token_at: float | None = None
        self.number = 0
        """Its number in the journal, if there is one."""
        self.expectation = expectation
        """What it will have stored, if its prompt was read token by token."""
        self.settled = settled
        """What it was believed to find was computed: the replica had nothing without a first token."""

    @property
    def over(self) -> bool:
        """Finished, failed or cancelled."""
        return self.booking.state == Booking.RELEASED
