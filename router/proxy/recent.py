"""The last decisions, and what became of them: for people who watch. Bounded, gone with the router."""

from collections import deque
from typing import Final

from mypy_extensions import mypyc_attr

from router.routing.decision import Decision
from router.routing.prompt_blocks import UNREADABLE, Prompt

KEPT: Final = 256
LONGEST_MODEL: Final = 256
"""Characters. A prompt whose model's name is longer is not kept: clients write what they like there."""


@mypyc_attr(acyclic=True)
class RecentDecision:
    """One try of one request."""

    __slots__ = ("at", "decision", "number", "prompt", "replica", "request_id", "retried", "status", "ttft_s")

    def __init__(
        self, number: int, at: float, request_id: bytes, replica: str, decision: Decision, prompt: Prompt
    ) -> None:
        self.number = number
        self.at = at
        """Seconds of the router's clock."""
        self.request_id = request_id
        self.replica = replica
        self.decision = decision
        self.prompt = prompt
        self.retried = False
        """It failed, and another replica was tried."""
        self.status: int | None = None
        """What the client got, once it is over."""
        self.ttft_s: float | None = None


class Recent:
    """The last ``KEPT`` decisions, the oldest first."""

    __slots__ = ("_count", "rows")

    def __init__(self) -> None:
        self._count = 0
        self.rows: deque[RecentDecision] = deque(maxlen=KEPT)

    def decided(
        self, at: float, request_id: bytes, replica: str, decision: Decision, prompt: Prompt
    ) -> RecentDecision:
        """A request goes to ``replica``; whoever knows how it ends says so in what is returned."""
        self._count += 1
        if prompt.model is not None and len(prompt.model) > LONGEST_MODEL:
            prompt = UNREADABLE
        row = RecentDecision(self._count, at, request_id, replica, decision, prompt)
        self.rows.append(row)
        return row
