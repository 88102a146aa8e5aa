"""What goes into the engine, and what comes out of it step by step."""

from dataclasses import dataclass, field

from replica.kv_cache.tier_transport import PeerOffer
from replica.model.sampling import Drawn, Sampling, StopRule


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: StopRule = field(default_factory=StopRule)
    skip_special_tokens: bool = True
    priority: int = 0
    """Lower runs sooner."""
    salt: str | None = None
    """Cached prefixes are shared only between requests with the same salt."""
    source: PeerOffer | None = None
    """Another replica that has KV of the prompt."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a reply. ``finish_reason`` is set in a request's last one."""

    request_id: str
    text: str
    tokens: tuple[Drawn, ...]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    output_tokens: int
    """Tokens generated so far."""
    finish_reason: str | None = None
    """stop, length, abort or error."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; ``None`` for the model's own end token."""
    error: str | None = None
