"""Is what the router believes to be cached really cached? Predicted against reported tokens, per replica."""

from typing import Final

FORGET_PER_REQUEST: Final = 0.98
LOW_RATIO: Final = 0.5
ENOUGH_TOKENS: Final = 8_192
MIN_BELIEVED_TOKENS: Final = 512
"""Believed hits below this are too short to tell a replica without its cache by."""
DOUBTS_MAKE_CERTAIN: Final = 8


class Credit:
    """Counts, and a running ratio over about the last 50 requests that reported their cached tokens.

    >>> credit = Credit()
    >>> for _ in range(20):
    ...     credit.answered(predicted_tokens=1_000, cached_tokens=400, prompt_tokens=1_600)
    >>> credit.predicted_tokens, credit.cached_tokens, round(credit.ratio, 2), credit.low
    (20000, 8000, 0.4, True)
    """

    __slots__ = (
        "_doubts",
        "_recent_cached",
        "_recent_predicted",
        "cached_tokens",
        "predicted_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.predicted_tokens = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        """Of the prompts whose cached tokens were reported."""
        self._recent_predicted = 0.0
        self._recent_cached = 0.0
        self._doubts = 0

    def answered(self, predicted_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        """Of ``prompt_tokens``, ``predicted_tokens`` were believed cached; the replica reports what was."""
        self.predicted_tokens += predicted_tokens
        self.cached_tokens += cached_tokens
        self.prompt_tokens += prompt_tokens
        self._recent_predicted = self._recent_predicted * FORGET_PER_REQUEST + predicted_tokens
        self._recent_cached = self._recent_cached * FORGET_PER_REQUEST + cached_tokens

    def cache_lost(
        self, predicted_tokens: int, prompt_tokens: int, cached_tokens: int, *, settled: bool
    ) -> bool:
        """True if the answer shows that the replica lost its whole cache (restart, reset).

        Nothing was cached of a prompt of which more than half was believed to be. That is certain where the
        belief was ``settled``: no request was under way there that may have been overtaken before it computed
        what both share. Else it is a doubt, and eight in a row without a hit are certain, too.

        >>> credit = Credit()
        >>> credit.cache_lost(900, 1_000, 0, settled=True)
        True
        >>> [credit.cache_lost(900, 1_000, 0, settled=False) for _ in range(8)].index(True)
        7
        """
        if cached_tokens:
            self._doubts = 0
            return False
        if predicted_tokens < MIN_BELIEVED_TOKENS or predicted_tokens < prompt_tokens // 2:
            return False
        self._doubts += 1
        if not settled and self._doubts < DOUBTS_MAKE_CERTAIN:
            return False
        self._doubts = 0
        return True

    @property
    def ratio(self) -> float | None:
        """Recently reported over recently predicted tokens; ``None`` until enough were predicted."""
        if self._recent_predicted < ENOUGH_TOKENS:
            return None
        return self._recent_cached / self._recent_predicted

    @property
    def low(self) -> bool:
        """Less than half of what is believed is there: the router reads prompts differently from the engine,
        or does not see its evictions. Worth an alert."""
        ratio = self.ratio
        return ratio is not None and ratio < LOW_RATIO
