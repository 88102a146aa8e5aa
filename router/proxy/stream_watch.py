"""What the router reads in an answer that it passes on: the first token, the usage, a proper ending.

It never changes a byte and never raises: what it cannot read it does not know. Until the first token
every event is looked at; after that only the last few KiB are kept, for the usage at the end.
"""

from typing import Any

import orjson

from router.routing.in_flight import Usage

TAIL_BYTES = 4096
MAX_LINE_BYTES = 1024 * 1024
MAX_DATA_LINES = 1024
MAX_JSON_BYTES = 1024 * 1024

_DELTA_FIELDS = (
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
            end = b"".join(self.pieces)[-TAIL_BYTES:]
            self.pieces[:] = (end,)
            self._bytes = len(end)
            self._looked = 1

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
        """``[DONE]`` was the last event."""
        return self.tail.rstrip().endswith(b"[DONE]")

    @property
    def ended_properly(self) -> bool:
        """The generation said that it was over: ``[DONE]``, a finish reason, or an error of the replica's."""
        return says_over(self.tail)

    def usage(self) -> Usage | None:
        """What the last event with a usage says."""
        return usage_at_end(self.tail.replace(b"\ndata:", b"\n"))  # its JSON may be cut into data lines


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
        body = b"".join(self.pieces)
        return json_usage(body) if self._all else usage_at_end(body)


def has_content(data: bytes) -> bool:
    """Whether the event ``data`` carries some of the answer's content.

    >>> has_content(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}')
    False
    >>> has_content(b' {"choices":[{"delta":{"content":"Hi"}}]}')
    True
    >>> has_content(b'{"type":"response.output_text.delta","delta":"Hi"}'), has_content(b" [DONE]")
    (True, False)
    """
    if b"{" not in data:
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


def says_over(tail: bytes) -> bool:
    """Whether the end of a stream has a mark that it is complete or that the replica itself failed.

    >>> says_over(b'data: {"choices":[{"delta":{},"finish_reason": "stop"}]}\\n\\n')
    True
    >>> says_over(b'data: {"choices":[{"delta":{"content":"x"},"finish_reason": null}]}\\n\\n')
    False
    """
    if b"data: [DONE]" in tail or b"data:[DONE]" in tail or b'"error"' in tail:
        return True
    at = tail.rfind(b'"finish_reason"')
    return at >= 0 and tail[at + 15 :].lstrip(b" :")[:1] == b'"'


def json_usage(body: bytes) -> Usage | None:
    """The usage in a whole answer, if it is JSON with one."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return _usage(answer.get("usage"), answer.get("timings")) if type(answer) is dict else None


def usage_at_end(tail: bytes) -> Usage | None:
    """The last usage object in ``tail``, read without the rest of its event; or llama.cpp's timings.

    >>> usage_at_end(b'..."usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}')
    Usage(prompt_tokens=9, output_tokens=None, cached_tokens=4)
    >>> usage_at_end(b'..."timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}}')
    Usage(prompt_tokens=237, output_tokens=35, cached_tokens=236)
    """
    usage = _object_at_end(tail, b'"usage"')
    return _usage(usage, _object_at_end(tail, b'"timings"') if b'"cache_n"' in tail else None)


def _object_at_end(tail: bytes, name: bytes) -> Any:
    """The last object of that ``name`` in ``tail``, if it is whole."""
    at = tail.rfind(name)
    if at < 0:
        return None
    start = tail.find(b"{", at, at + len(name) + 9)
    if start < 0:
        return None
    depth = 0
    for end in range(start, min(len(tail), start + 2048)):
        byte = tail[end]
        if byte == 0x7B:
            depth += 1
        elif byte == 0x7D:
            depth -= 1
            if not depth:
                try:
                    return orjson.loads(tail[start : end + 1])
                except orjson.JSONDecodeError:
                    return None
    return None


def _usage(usage: Any, timings: Any) -> Usage | None:
    """The usage object; what it does not tell of the cache from llama.cpp's ``timings``, if there are any."""
    told = read_usage(usage)
    if type(timings) is not dict or (told is not None and told.cached_tokens is not None):
        return told
    cached, computed = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
    if cached is None or computed is None:
        return told
    if told is None:
        return Usage(cached + computed, _count(timings.get("predicted_n")), cached)
    return Usage(told.prompt_tokens, told.output_tokens, cached)


def read_usage(usage: Any) -> Usage | None:
    """An OpenAI usage object, of chat and completions or of responses."""
    if type(usage) is not dict:
        return None
    get = usage.get
    details = get("prompt_tokens_details") or get("input_tokens_details")
    return Usage(
        _count(get("prompt_tokens", get("input_tokens"))),
        _count(get("completion_tokens", get("output_tokens"))),
        _count(details.get("cached_tokens")) if type(details) is dict else None,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 40 else None
