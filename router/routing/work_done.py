"""Prefill that was done: how long it took, and what the prior says of its parts."""

from router.routing.cost_shape import Parts


class WorkDone:
    """Sums, in seconds, that forget as their owner tells them.

    >>> done = WorkDone()
    >>> done.add(busy_s=0.6, token_s=0.1, attention_s=0.05, fixed_s=0.05)
    >>> round(done.factor, 9), round(done.level(Parts(second=3.0, third=1.0)), 9)
    (3.0, 2.0)
    """

    __slots__ = ("attention_s", "busy_s", "fixed_s", "token_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing was done."""
        self.busy_s = self.token_s = self.attention_s = self.fixed_s = 0.0

    def add(self, busy_s: float, token_s: float, attention_s: float, fixed_s: float) -> None:
        """In ``busy_s`` was done what the prior puts at the sum of the others."""
        self.busy_s += busy_s
        self.token_s += token_s
        self.attention_s += attention_s
        self.fixed_s += fixed_s

    def keep(self, share: float) -> None:
        """Forget all but ``share`` of it."""
        self.busy_s *= share
        self.token_s *= share
        self.attention_s *= share
        self.fixed_s *= share

    @property
    def predicted_s(self) -> float:
        """What the prior says of the whole."""
        return self.token_s + self.attention_s + self.fixed_s

    @property
    def factor(self) -> float:
        """How many times longer than by the prior it took."""
        return self.busy_s / self.predicted_s

    def level(self, parts: Parts) -> float:
        """How many times longer the first part, tokens, took if the others stand to it as ``parts`` says."""
        return self.busy_s / (self.token_s + parts.second * self.attention_s + parts.third * self.fixed_s)
