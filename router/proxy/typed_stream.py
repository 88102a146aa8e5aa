"""Streams whose every event says its type, and one type ends them: OpenAI's Responses, Anthropic's messages.

What ends them: https://platform.openai.com/docs/api-reference/responses-streaming,
https://docs.anthropic.com/en/api/messages-streaming. A stream that never showed such an event is some other
kind, and ends as it ends.
"""

from typing import Final

import orjson

from router.proxy.router_error import RouterError
from router.proxy.stream_watch import StreamWatch, says_done

CARRIED_BYTES: Final = 48
"""So much of the bytes before is looked at again: a type may be cut anywhere."""
MAX_DIGITS: Final = 15


class EventForm:
    """How one API names its events. ``opening``: what the names of events begin with that only it has."""

    __slots__ = ("lasts", "opening")

    def __init__(self, opening: bytes, lasts: tuple[bytes, ...]) -> None:
        self.opening = opening
        self.lasts = lasts

    def error_event(self, error: RouterError, message: str, tail: bytes) -> bytes:
        """The event that tells ``error`` after a payload that ends with ``tail``."""
        raise NotImplementedError


class ResponsesForm(EventForm):
    """OpenAI's Responses."""

    __slots__ = ()

    def error_event(self, error: RouterError, message: str, tail: bytes) -> bytes:
        r"""Numbered like the events before it.

        >>> from router.proxy.router_error import REPLICA_BROKEN
        >>> print(RESPONSES.error_event(REPLICA_BROKEN, "Broke", b'{"sequence_number": 6}').decode().strip())
        event: error
        data: {"type":"error","code":"replica_broken","message":"Broke","param":null,"sequence_number":7}
        """
        event = {
            "type": "error",
            "code": error.code,
            "message": message,
            "param": error.param,
            "sequence_number": _last_number(tail) + 1,
        }
        return b"event: error\ndata: %b\n\n" % orjson.dumps(event)


class MessagesForm(EventForm):
    """Anthropic's messages."""

    __slots__ = ()

    def error_event(self, error: RouterError, message: str, tail: bytes) -> bytes:
        r"""Its type is Anthropic's, of which there are few; our code stands in the message.

        >>> from router.proxy.router_error import IDLE_TIMEOUT
        >>> print(MESSAGES.error_event(IDLE_TIMEOUT, "Silent", b"").decode().strip())
        event: error
        data: {"type":"error","error":{"type":"timeout_error","message":"Silent (idle_timeout)"}}
        """
        kind = "timeout_error" if error.status == 504 else "api_error"
        told = {"type": "error", "error": {"type": kind, "message": f"{message} ({error.code})"}}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(told)


RESPONSES: Final = ResponsesForm(
    b'"response.', (b'"response.completed"', b'"response.failed"', b'"response.incomplete"', b'"error"')
)
MESSAGES: Final = MessagesForm(b'"message_start"', (b'"message_stop"', b'"error"'))
FORMS: Final[dict[bytes, EventForm]] = {b"/v1/responses": RESPONSES, b"/v1/messages": MESSAGES}
"""By path."""


class TypedStreamWatch(StreamWatch):
    """As ``StreamWatch``; what ends the stream is its last event's type."""

    __slots__ = ("_before", "_over", "_searched", "form", "recognized")

    def __init__(self, form: EventForm) -> None:
        super().__init__()
        self.form = form
        self.recognized = False
        """An event of the form was seen."""
        self._over = False
        """So was one that ends the stream, or its beginning."""
        self._searched = 0
        """Pieces that were searched for types."""
        self._before = b""

    def grew(self, count: int) -> None:
        """See ``StreamWatch``."""
        for piece in self.pieces[self._searched :]:
            self._look_for_types(piece)
        super().grew(count)
        self._searched = len(self.pieces)

    def _look_for_types(self, piece: bytes) -> None:
        text = self._before + piece
        form = self.form
        if not self.recognized:
            self.recognized = _has_type(text, form.opening)
        if not self._over:
            self._over = any(_has_type(text, last) for last in form.lasts)
        self._before = text[-CARRIED_BYTES:]

    @property
    def said_done(self) -> bool:
        """The last event was one that ends the stream."""
        return self._over or says_done(self.tail)

    @property
    def ended_properly(self) -> bool:
        """As far as the stream is of the form, it said that it was over, in a whole line."""
        if not self.recognized:
            return True
        tail = self.tail
        return (self._over and tail.endswith((b"\n", b"\r"))) or says_done(tail) or _is_error(tail)


def stream_watch(path: bytes) -> StreamWatch:
    """What watches a stream that answers a request to ``path``."""
    form = FORMS.get(path)
    return StreamWatch() if form is None else TypedStreamWatch(form)


def _has_type(text: bytes, name: bytes) -> bool:
    """Whether an object in ``text`` has the type that ``name``, with its quotes, begins.

    In a string of JSON a quote has a backslash before it: no text can look like this.
    """
    at = text.find(name)
    while at >= 0:
        if text[max(0, at - 16) : at].rstrip(b" :").endswith(b'"type"'):
            return True
        at = text.find(name, at + 1)
    return False


def _is_error(tail: bytes) -> bool:
    """Whether the last event is an error in the form of OpenAI's other streams: engines send that for all."""
    _, _, line = tail.rstrip().rpartition(b"\n")
    return line.startswith(b"data:") and line[5:].lstrip(b" {").startswith(b'"error"')


def _last_number(tail: bytes) -> int:
    """The last ``sequence_number`` in ``tail``; -1 if there is none."""
    _, name, after = tail.rpartition(b'"sequence_number"')
    digits = after.lstrip(b" :")[:MAX_DIGITS]
    end = len(digits) - len(digits.lstrip(b"0123456789"))
    return int(digits[:end]) if name and end else -1
