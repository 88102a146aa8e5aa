"""What the router reads in an answer that it passes on: the first token, the usage, a proper ending.

It never changes a byte and never raises: what it cannot read it does not know. Until the first token
every event is looked at; after that only the last few KiB are kept, for the usage at the end.
"""

from typing import Any, Final

import orjson

from router.proxy.usage import usage_at_end
from router.routing.in_flight import Usage

TAIL_BYTES: Final = 4096
USAGE_WITHIN_BYTES: Final = 2048
"""A stream's usage is looked for in so much of its end, and in the whole read in which that begins."""
MAX_LINE_BYTES: Final = 1024 * 1024
MAX_DATA_LINES: Final = 1024
MAX_JSON_BYTES: Final = 1024 * 1024

_USUAL_DONE: Final = b"data: [DONE]\n\n"
_USUAL_CONTENT: Final = b'"delta":{"content":"'
_DONE_BEGINS: Final = (b"data: ", b"data:")
_LINE_ENDS: Final = (b"\n", b"\r", b"")
_DELTA_FIELDS: Final = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
)


class StreamWatch:
    """Reads one event stream's payload, cut anywhere.

    Whoever reads the payload appends it to ``pieces`` and then says that it ``grew``.
    """

    __slots__ = ("_bytes", "_event", "_line", "_looked", "first_token", "pieces")

    def __init__(self) -> None:
        self.first_token = False
        """An event with content was seen."""
        self.pieces: list[bytes] = []
        """The payload's end: at least the last ``TAIL_BYTES`` of it, at most about twice that."""
        self._bytes = 0
        self._looked = 0
        """Pieces that were searched for a first token."""
        self._line = b""
        """The beginning of a line whose end has not come yet."""
        self._event: list[bytes] = []
        """The data lines so far of an event whose end, an empty line, has not come yet."""

    def grew(self, count: int) -> None:
        """``pieces`` grew by ``count`` bytes, or a little less."""
        self._bytes += count
        if not self.first_token:
            for piece in self.pieces[self._looked :]:
                self._look_for_token(piece)
            self._looked = len(self.pieces)
        if self._bytes > 2 * TAIL_BYTES:
            self._forget()

    def _forget(self) -> None:
        """Keep the end: whole pieces of it, without copying, unless these are long."""
        pieces = self.pieces
        first, kept = len(pieces), 0
        while first and kept < TAIL_BYTES:
            first -= 1
            kept += len(pieces[first])
        del pieces[:first]
        if kept > 2 * TAIL_BYTES:
            kept = TAIL_BYTES
            pieces[:] = (b"".join(pieces)[-TAIL_BYTES:],)
        self._bytes = kept
        self._looked = len(pieces)

    def _look_for_token(self, payload: bytes) -> None:
        text = self._line + payload if self._line else payload
        start = 0
        while not self.first_token:
            end = text.find(b"\n", start)
            if end < 0:
                self._line = text[start:]
                # So long an event is content, whatever it says.
                self.first_token = len(self._line) > MAX_LINE_BYTES or len(self._event) > MAX_DATA_LINES
                break
            if text.startswith(b"data:", start):
                self._event.append(text[start + 5 : end])
            elif end - start < 2 and self._event:
                self.first_token = has_content(b"".join(self._event))
                self._event.clear()
            start = end + 1
        if self.first_token:
            self._line = b""
            self._event.clear()

    @property
    def tail(self) -> bytes:
        """The payload's end."""
        return b"".join(self.pieces)

    @property
    def between_events(self) -> bool:
        """The payload so far ends with a whole event."""
        end = self.tail[-4:]
        return not end or end.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    @property
    def said_done(self) -> bool:
        """``[DONE]`` was said: nothing comes after it."""
        return says_done(self.tail)

    @property
    def ended_properly(self) -> bool:
        """The generation said that it was over: ``[DONE]``, a finish reason, or an error of the replica's."""
        pieces = self.pieces
        if not pieces:
            return False
        usual = pieces[-1] == _USUAL_DONE and (len(pieces) == 1 or pieces[-2].endswith(b"\n"))
        return usual or says_over(self.tail)

    def usage(self) -> Usage | None:
        """What the last event with a usage says. It is the last but one: not all that is kept is searched."""
        pieces = self.pieces
        first, count = len(pieces), 0
        while first and count < USAGE_WITHIN_BYTES:
            first -= 1
            count += len(pieces[first])
        return usage_at_end(b"".join(pieces[first:])[-TAIL_BYTES:])


class JsonWatch:
    """Keeps one JSON answer to read its usage at the end; the end alone of a very long one."""

    __slots__ = ("_all", "_bytes", "first_token", "pieces")

    def __init__(self) -> None:
        self.first_token = False
        """Never seen in such an answer."""
        self.pieces: list[bytes] = []
        self._bytes = 0
        self._all = True

    def grew(self, count: int) -> None:
        """``pieces`` grew by ``count`` bytes, or a little less."""
        self._bytes += count
        if self._bytes > (MAX_JSON_BYTES if self._all else 2 * TAIL_BYTES):
            self._all = False
            end = b"".join(self.pieces)[-TAIL_BYTES:]
            self.pieces[:] = (end,)
            self._bytes = len(end)

    def usage(self) -> Usage | None:
        """The answer's usage, if it is JSON with one."""
        return usage_at_end(b"".join(self.pieces))


def has_content(data: bytes) -> bool:
    """Whether the event ``data`` carries some of the answer's content.

    >>> has_content(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}')
    False
    >>> has_content(b' {"choices":[{"delta":{"content":"Hi"}}]}')
    True
    >>> has_content(b'{"type":"response.output_text.delta","delta":"Hi"}'), has_content(b" [DONE]")
    (True, False)
    """
    at = data.find(_USUAL_CONTENT)
    if at >= 0 and data[at + len(_USUAL_CONTENT) :][:1] != b'"':
        return True
    if data.find(b"{") < 0:  # "in" looks for a number first, and raises and catches an error
        return False
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    if type(event) is not dict:
        return False
    choices = event.get("choices")
    if type(choices) is list:
        return any(_choice_has_content(choice) for choice in choices)
    kind = event.get("type")
    if type(kind) is str and kind.endswith("delta"):
        return bool(event.get("delta"))
    return False


def _choice_has_content(choice: Any) -> bool:
    if type(choice) is not dict:
        return False
    delta = choice.get("delta")
    if type(delta) is dict:
        return any(delta.get(field) for field in _DELTA_FIELDS)
    return bool(choice.get("text"))


def says_done(tail: bytes) -> bool:
    r"""Whether the stream's last word, ``[DONE]``, is there: a line of its own, not a word of the answer.

    >>> says_done(b"data: [DONE]\n\n"), says_done(b'data: {"choices":[{"text":"data: [DONE]"}]}\n\n')
    (True, False)
    >>> says_done(b'data: {"choices":[{"text":"cut off after data: [DONE]')
    False
    """
    at = tail.rfind(b"[DONE]")
    while at >= 0:
        start = max(tail.rfind(b"\n", 0, at), tail.rfind(b"\r", 0, at)) + 1
        if tail[start:at] in _DONE_BEGINS and tail[at + 6 : at + 7] in _LINE_ENDS:
            return True
        at = tail.rfind(b"[DONE]", 0, at)
    return False


def says_over(tail: bytes) -> bool:
    r"""Whether the end of a stream has a mark that it is complete or that the replica itself failed.

    >>> says_over(b'data: {"choices":[{"delta":{},"finish_reason": "stop"}]}\n\n')
    True
    >>> says_over(b'data: {"choices":[{"delta":{"content":"x"},"finish_reason": null}]}\n\n')
    False
    """
    if says_done(tail) or says_error(tail):
        return True
    at = tail.rfind(b'"finish_reason"')
    return at >= 0 and tail[at + 15 :].lstrip(b" :")[:1] == b'"'


def says_error(tail: bytes) -> bool:
    r"""Whether the end of a stream tells an error of the replica's own.

    >>> says_error(b'data: {"error": {"message": "engine died"}}\n\n'), says_error(b'data: {"error": null}')
    (True, False)
    >>> says_error(b'{"logprobs":{"content":[{"token":"error","logprob":-1.0}]}}')  # the model's word
    False
    """
    at = tail.rfind(b'"error"')
    while at >= 0:
        after = tail[at + 7 :].lstrip()
        told = after.startswith(b":") and not after[1:].lstrip().startswith(b"null")
        if told or tail[:at].rstrip(b" :").endswith(b'"type"'):
            return True
        at = tail.rfind(b'"error"', 0, at)
    return False
