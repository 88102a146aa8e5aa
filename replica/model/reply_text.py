"""The text of one reply as its tokens come: whole characters only, cut at the first stop string."""

from replica.model.detokenizer import Detokenizer
from replica.model.sampling import StopRule
from replica.model.tokenizer import Tokenizer


class ReplyText:
    """Turns tokens into text that may be sent at once.

    Text that could be the beginning of a stop string is held back until it is clear:

    >>> from replica.model.tiny import tiny_tokenizer
    >>> reply = ReplyText(tiny_tokenizer(), StopRule(stop_strings=("STOP",)))
    >>> [reply.push(byte) for byte in b"aSTx"]
    ['a', '', '', 'STx']
    >>> [reply.push(byte) for byte in b"bSTO"], reply.push(ord("P")), reply.stopped_by
    (['b', '', '', ''], '', 'STOP')
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopRule, *, skip_special_tokens: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = stops
        self._held = ""
        self._tokens = 0
        self.stopped_by: str | None = None
        """The stop string that ended the reply."""

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        self._tokens += 1
        return self._certain(self._detokenizer.push(token))

    def close(self) -> str:
        """The reply is over: what was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._certain(self._detokenizer.close())
        held, self._held = self._held, ""
        return text + held

    def _certain(self, text: str) -> str:
        stops = self._stops.stop_strings
        if not stops:
            return text
        self._held += text
        # Before min_tokens a whole one is text; one that has begun by then may end the reply later.
        may_stop = self._tokens >= self._stops.min_tokens
        # Which is whole first, as if characters came one by one: what a token holds decides nothing.
        found = [(at + len(stop), at, stop) for stop in stops if (at := self._held.find(stop)) >= 0]
        if found and may_stop:
            _, at, stop = min(found)
            self.stopped_by = stop
            out, self._held = self._held[: at + len(stop) if self._stops.include_stop else at], ""
            return out
        keep = max(_overlap(self._held, stop) for stop in stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are a beginning of ``stop``, at most all but one of it.

    >>> _overlap("one ST", "STOP"), _overlap("STOST", "STOP"), _overlap("none", "STOP")
    (2, 2, 0)
    """
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
