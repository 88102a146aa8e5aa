"""One simulated request on its way, and what became of it."""

from typing import NamedTuple

from replica.sequence import Sequence
from router.routing.decision import Reason
from router.routing.in_flight import InFlight
from router.routing.kv_route import Step
from router.routing.prompt_blocks import Prompt
from sim.outcome import Outcome
from sim.simulated_router import SimulatedRouter
from sim.two_pools import Moved


class Prefilled(NamedTuple):
    """The first of two steps, done."""

    replica: int
    cached_tokens: int


class SimulatedRequest(Moved):
    """One request on its way; the sequence on the replica carries it as its ``parameters``."""

    __slots__ = (
        "arrived_s",
        "first_token_s",
        "flight",
        "position",
        "prefilled",
        "prompt",
        "router",
        "tried",
    )

    def __init__(self, position: int, prompt: Prompt, router: SimulatedRouter, arrived_s: float) -> None:
        super().__init__()
        self.position = position
        self.prefilled: Prefilled | None = None
        """Set once a prefill replica has computed the prompt."""
        self.prompt = prompt
        self.router = router
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.flight: InFlight | None = None
        self.tried: tuple[int, ...] = ()

    @property
    def in_first_step(self) -> bool:
        """It was sent to have its prompt computed for another replica."""
        assert self.flight is not None
        route = self.flight.decision.route
        return route is not None and route.step is Step.PREFILL

    def outcome(
        self, sequence: Sequence | None, prompt_tokens: int, now: float, error: str | None
    ) -> Outcome:
        """What became of it, ``now`` that it is over. ``sequence``: on the replica that had it last."""
        first, flight, prefilled = self.first_token_s, self.flight, self.prefilled
        cached_tokens = 0 if sequence is None else sequence.cached_tokens
        replica = None if flight is None else flight.replica.index
        if prefilled is not None:  # whose work the prompt was
            replica, cached_tokens = prefilled
        return Outcome(
            sent_s=self.arrived_s,
            prompt_tokens=prompt_tokens,
            output_tokens=0 if sequence is None else sequence.output_tokens,
            cached_tokens=cached_tokens,
            ttft_s=None if first is None else first - self.arrived_s,
            e2e_s=now - self.arrived_s,
            replica=replica,
            spilled=flight is not None and flight.decision.reason is Reason.SPILL,
            error=error,
        )


def carried_by(sequence: Sequence) -> SimulatedRequest:
    """The request of a replica's ``sequence``."""
    request = sequence.parameters
    assert isinstance(request, SimulatedRequest)
    return request
