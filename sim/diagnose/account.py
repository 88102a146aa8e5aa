"""Where every prompt token went: served from a cache, or prefilled for one of these causes, to the token."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a prompt token was prefilled. In the order in which a prompt meets them."""

    FIRST_SIGHT = "first sight"
    TRIMMED = "trimmed conversations"
    PASSAGES = "passages in another order"
    CHANGING_TEXT = "text that changes"
    TOOLS = "tools written differently"
    MODEL = "another model"
    SALT = "another salt"
    TEMPLATE = "template or tokenizer"
    BLOCKS = "part blocks and last token"
    CAPACITY = "capacity"
    ROUTING = "spread over replicas"
    ENGINE = "not explained by replay"


SAYS = {
    Cause.FIRST_SIGHT: "never stood so in an earlier prompt: nobody could have cached it",
    Cause.TRIMMED: "messages moved because older ones were dropped from the head",
    Cause.PASSAGES: "the same passages stood in an earlier prompt, in another order",
    Cause.CHANGING_TEXT: "a date, id or counter stands before text that many prompts share",
    Cause.TOOLS: "the same tools, listed or serialised in another order",
    Cause.MODEL: "the same text for another model or adapter: caches cannot share it",
    Cause.SALT: "the same text under another cache_salt: kept apart on purpose, or by accident",
    Cause.TEMPLATE: "the same text became other tokens: chat template or tokenizer differ",
    Cause.BLOCKS: "caches match whole blocks, and always compute the last token",
    Cause.CAPACITY: "evicted before it came again; one cache as large as the fleet's together misses it, too",
    Cause.ROUTING: "cached on another replica, or computed on two at once",
    Cause.ENGINE: "caches fed like this should have had it; the replicas reported less",
}
"""One line per cause."""

SAYS_BELOW_ZERO = {
    Cause.ROUTING: "below zero: the replicas had more than one LRU cache as large as all of them together",
    Cause.ENGINE: "below zero: the replicas reported more than caches fed like this have",
}
"""The same where less than nothing was lost; the others cannot be below zero."""

PROMPT_CAUSES = (Cause.TRIMMED, Cause.PASSAGES, Cause.CHANGING_TEXT, Cause.TOOLS, Cause.SALT, Cause.MODEL)
"""What callers can mend."""


def says(cause: Cause, tokens: int) -> str:
    """What it means that ``tokens`` were lost to ``cause``."""
    return SAYS_BELOW_ZERO.get(cause, SAYS[cause]) if tokens < 0 else SAYS[cause]


@dataclass(frozen=True, slots=True)
class Account:
    """``prompt_tokens`` is ``cached_tokens`` plus all ``lost``, to the token.

    >>> account = Account.of_levels(100, [(Cause.FIRST_SIGHT, 60), (Cause.CAPACITY, 50), (Cause.ROUTING, 30)])
    >>> [(cause.value, tokens) for cause, tokens in account.lost], account.cached_tokens
    ([('first sight', 40), ('capacity', 10), ('spread over replicas', 20)], 30)
    """

    prompt_tokens: int
    cached_tokens: int
    lost: tuple[tuple[Cause, int], ...]
    """Tokens per cause. Below zero where a level did better than the bound above it: a simulated fleet that
    keeps the KV of its answers, an engine that was warm before the log began."""

    @classmethod
    def of_levels(cls, prompt_tokens: int, levels: Sequence[tuple[Cause, int]]) -> "Account":
        """``levels`` go down from all tokens to those cached: (cause, tokens left after it)."""
        lost = []
        left = prompt_tokens
        for cause, after in levels:
            lost.append((cause, left - after))
            left = after
        return cls(prompt_tokens, left, tuple(lost))

    def tokens(self, cause: Cause) -> int:
        """Lost to ``cause``; 0 where it was not looked at."""
        return dict(self.lost).get(cause, 0)

    def share(self, tokens: int) -> float:
        """Of all prompt tokens."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0
