"""How many tokens a unit of prompt is: learned from what replicas report of whole prompts."""

from router.routing.cost_shape import FORGET_PER_OBSERVATION


class TokenRatio:
    """Tokens per unit of prompt (byte, or token in exact mode), learned from ``usage.prompt_tokens``.

    >>> ratio = TokenRatio(tokens_per_unit=0.25)
    >>> for _ in range(300):
    ...     ratio.learn(prompt_tokens=300, units=1_000)
    >>> round(ratio.tokens_per_unit, 2)
    0.3
    """

    __slots__ = ("_tokens", "_units")

    def __init__(self, tokens_per_unit: float = 0.25, weight_units: float = 2_000.0) -> None:
        self._tokens = tokens_per_unit * weight_units
        self._units = weight_units

    @property
    def tokens_per_unit(self) -> float:
        """The present estimate."""
        return self._tokens / self._units

    @property
    def learned(self) -> tuple[float, float]:
        """Tokens and units seen, to be taken up again."""
        return self._tokens, self._units

    def resumed(self, tokens: float, units: float) -> None:
        """Take up what was learned elsewhere."""
        if units > 0.0 and 0.005 < tokens / units < 20.0:
            self._tokens, self._units = tokens, units

    def learn(self, prompt_tokens: int, units: int) -> None:
        """A prompt of ``units`` units turned out to have ``prompt_tokens`` tokens."""
        if units <= 0 or prompt_tokens <= 0 or not 0.005 < prompt_tokens / units < 20.0:
            return
        self._tokens = self._tokens * FORGET_PER_OBSERVATION + prompt_tokens
        self._units = self._units * FORGET_PER_OBSERVATION + units
