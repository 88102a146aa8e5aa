"""One request on one replica, from dispatch to its last byte; and what the replica said it used."""

from mypy_extensions import mypyc_attr

from router.routing.decision import Decision
from router.routing.exact_index import Expectation
from router.routing.kv_route import KvPull, Step
from router.routing.ledger import Booking
from router.routing.peer_events import PromptCount
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState


@mypyc_attr(acyclic=True, free_list_len=1)
class Usage:
    """What a replica reported about a finished request; ``None`` is "not told". Never changed."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens")

    def __init__(
        self,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens

    @property
    def prompt_count(self) -> PromptCount | None:
        """What was told of the prompt, if that is whole and can be."""
        prompt, cached = self.prompt_tokens, self.cached_tokens
        if prompt is None or cached is None or not prompt or cached > prompt:
            return None
        return PromptCount(prompt, cached)

    def _values(self) -> tuple[int | None, int | None, int | None]:
        return self.prompt_tokens, self.output_tokens, self.cached_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        prompt, output, cached = self._values()
        return f"Usage(prompt_tokens={prompt}, output_tokens={output}, cached_tokens={cached})"


class InFlight:
    """Owned by the fleet, which alone changes it."""

    __slots__ = (
        "booking",
        "decision",
        "due_at",
        "due_order",
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
        self.due_at = 0.0
        self.due_order = 0
        """Both of ``FirstTokensDue``."""
        self.number = 0
        """Its number in the journal, if there is one."""
        self.expectation = expectation
        """What it will have stored, if its prompt was read token by token."""
        self.settled = settled
        """What it was believed to find was computed: the replica had nothing without a first token."""

    @property
    def pulled(self) -> bool:
        """Some of its KV comes from another replica."""
        route = self.decision.route
        return route is not None and route.step is Step.PULL

    @property
    def timed(self) -> bool:
        """From dispatch to first token its replica computed, and nothing else was waited for."""
        route = self.decision.route
        if route is None or route.step is Step.DIRECT:
            return True
        return route.step is Step.PREFILL and self.replica.spec.kv_pull is not KvPull.LLMD

    @property
    def over(self) -> bool:
        """Finished, failed or cancelled."""
        return self.booking.state == Booking.RELEASED
