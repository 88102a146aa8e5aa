"""How the next token is drawn, and when a reply ends: the settings of one request, as plain values."""

from dataclasses import dataclass

GREEDY_BELOW = 1e-5
"""A temperature below this means: always the most likely token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw a token from its logits.

    Order, as in vLLM: bias, penalties, then (unless greedy) temperature, min_p, top_k, top_p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest."""
    seed: int | None = None
    """The same seed draws the same tokens, whatever else runs; ``None``: the engine chooses one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """Report the drawn token's log-probability and those of this many likeliest; ``None``: none."""

    @property
    def greedy(self) -> bool:
        """Nothing is left to chance."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """The logits decide as they are."""
        return (
            not self.logit_bias
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
        )


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a reply ends, besides ``max_tokens``."""

    end_ids: frozenset[int] = frozenset()
    """The model's own end tokens; empty when they are to be ignored."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens the request names."""
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    """Keep the stop string in the text."""
    min_tokens: int = 0
    """No end token is drawn and no stop string is looked for before this many tokens."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model, before temperature and penalties."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token drawn for one row."""

    token: int
    logprob: float | None = None
    """Natural log-probability, if asked for."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens, likeliest first."""
