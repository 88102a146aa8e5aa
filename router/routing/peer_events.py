"""What one router tells the others: events of the past, small enough to be sent for every request.

A request has a number, unique in its router's life. Replicas go by name, as every router of a fleet knows
them. Times are seconds; an instant is told as seconds from when it is told, for clocks differ.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Keys = Sequence[Annotated[int, msgspec.Meta(ge=0)]]
"""Chained block keys, 64 bits each."""


class WorkHeld(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A request waits in its router for ``replica``."""

    request: Count
    replica: str
    prefill_s: Seconds
    deadline_in_s: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    """Until it goes before all that are not overdue."""
    matched_tokens: Count
    keys: Keys
    naming: str | None = None
    tenant: str = ""
    """Whose it is; "" where tenants are not told apart."""
    priority: int = 0
    new_tokens: Count = 0
    """Of its prompt, those that are not cached there."""


class WorkSent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """A request was sent to ``replica``."""

    request: Count
    replica: str
    prefill_s: Seconds
    matched_tokens: Count
    new_tokens: Count
    expected_output_tokens: Count
    cold_prefill_s: Seconds | None
    """Of the whole prompt, had nothing been cached; ``None`` if it did not just arrive: a retry, or old."""
    keys: Keys
    """The chained keys of its prompt's whole blocks, in ``naming``."""
    naming: str | None = None
    """``None``: keys of text. Else the replica's own, as ``BlockNaming.described`` has it."""
    tenant: str = ""


class FirstTokenCame(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The request's prefill is over. ``seen`` is False if that is only taken to be so (not streamed)."""

    request: Count
    seen: bool = True


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a finished request teaches of decoding."""

    output_tokens: Count
    decoding_s: Seconds
    """After its first token, without the prefills beside it; 0 if that was not seen."""
    sequences: Count
    """Requests that decoded on the replica at its end."""


class PromptCount(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt as its replica reports it."""

    prompt_tokens: Count
    cached_tokens: Count

    @property
    def new_tokens(self) -> int:
        """Those that were computed: the last one always is."""
        return max(1, self.prompt_tokens - self.cached_tokens)


class WorkOver(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """The request is no longer sent, or no longer held. ``computed``: its blocks are there."""

    request: Count
    computed: bool = True
    reply: Reply | None = None
    count: PromptCount | None = None
    """What was computed and what was cached; ``None``: as believed."""


class ReplicaFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """The router ejected ``replica``."""

    replica: str


class CacheLost(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """``replica`` turned out to have lost its cache."""

    replica: str


class ReplicaDrained(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """An operator drained ``replica``, or gave it back. Of two orders the higher ``version`` counts."""

    replica: str
    on: bool
    version: Count


class PromptStored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """``replica`` has computed a prompt with these blocks, some time ago."""

    replica: str
    keys: Keys
    naming: str | None = None
    tenant: str = ""


class PrefixesAsked(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """A request begins with these prefixes, whose holders have work queued (``heat.py``)."""

    keys: Keys
    prefill_s: Seconds
    """What it needs there."""


PeerEvent = (
    WorkHeld
    | WorkSent
    | FirstTokenCame
    | WorkOver
    | ReplicaFailed
    | CacheLost
    | ReplicaDrained
    | PromptStored
    | PrefixesAsked
)
