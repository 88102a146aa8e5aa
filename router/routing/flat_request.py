"""A request of very many JSON values, read without an object for each: what is long in it stays text.

A prompt of 32,000 messages takes 16 ms as objects, 350,000 empty lists 55 ms, and nobody else is served
meanwhile. Only where it begins alike with another prompt matters here, and text shows that as well: keys made
of it agree among requests that are read so. A prompt of token ids has the same keys either way.
"""

from typing import Any, Final

import msgspec
import orjson

from router.routing.control_fields import CONTROL_FIELDS, XARGS

SHORT_BYTES: Final = 4 * 1024
"""Shorter values are read, however many they hold."""
_CONTAINERS: Final = (XARGS, "extra_body", "nvext")
"""What stands in these is looked for by name: they are read, or the request is not."""
MOST_CONTAINER_BYTES: Final = 32 * 1024
_FIELDS: Final = (
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "extra_key",
    "functions",
    "input",
    "instructions",
    "lora_path",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "prompt",
    "reasoning_effort",
    "response_format",
    "stream",
    "tools",
    *_CONTAINERS,
    *sorted(CONTROL_FIELDS),
)
"""All that the router looks at."""
_decoder: Final[Any] = msgspec.json.Decoder(
    msgspec.defstruct("_Fields", [(name, msgspec.Raw, None) for name in _FIELDS], gc=False)
)
_TEXTS: Final = ("content", "text", "tool_calls", "function", "arguments", "output")
"""Where long texts are in messages, their parts and calls of tools, and in what those hold."""
_ITEM: Final[Any] = msgspec.defstruct("_Item", [(name, msgspec.Raw, None) for name in _TEXTS], gc=False)
_item_decoder: Final[Any] = msgspec.json.Decoder(_ITEM)
_items_decoder: Final[Any] = msgspec.json.Decoder(list[_ITEM])
MOST_ITEMS: Final = 8_000
"""To look into: more are many values, whatever they hold."""
_MARKS: Final = b'"[{,'
_NO_MARKS: Final = bytes(byte for byte in range(256) if byte not in _MARKS)


class TokenIds:
    """A prompt of token ids, unread. ``text``: as JSON without spaces."""

    __slots__ = ("count", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.count = text.count(",") + 1


def whole_request(body: bytes) -> dict[str, Any] | None:
    """The object that ``body`` is; ``None`` if it is none."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return request if type(request) is dict else None


def read_fields(body: bytes) -> Any:
    """The fields of the object that ``body`` is, unread: for ``request_of``; ``None`` if it is none."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):  # the latter where it is nested too deeply
        return None


def request_of(fields: Any) -> dict[str, Any] | None:
    """The same as ``whole_request``, but for long values, which are text, and fields that nobody looks at.

    Cost, with ``read_fields``: O(bytes), 2 ns each. ``None``: it is no object, or cannot be read so.

    >>> body = b'{"model": "m", "messages": [' + b'{"role": "u"}, ' * 9_000 + b'{}], "x": 1}'
    >>> request = request_of(read_fields(body))
    >>> request["model"], type(request["messages"]), "x" in request
    ('m', <class 'str'>, False)
    >>> request_of(read_fields(b'{"prompt": [[' + b"17, " * 9_000 + b"17]]}"))["prompt"].count
    9001
    >>> read_fields(b"{]"), request_of(read_fields(b'{"vllm_xargs": {' + b'"a": 1,' * 9_000 + b'"b": 1}}'))
    (None, None)
    """
    request: dict[str, Any] = {}
    try:
        for name in _FIELDS:
            raw = getattr(fields, name)
            if raw is not None:
                request[name] = _value(name, bytes(raw))
    except ValueError:  # orjson's, UTF-8's, ours
        return None
    return request


def _value(name: str, raw: bytes) -> Any:
    most = MOST_CONTAINER_BYTES if name in _CONTAINERS else SHORT_BYTES
    if len(raw) <= most or raw[:1] not in b"[{":
        return orjson.loads(raw)
    if name in _CONTAINERS:
        raise ValueError("too long to look for names in it")
    if name == "prompt" and raw.find(b'"') < 0 and raw.find(b"{") < 0 and raw.rfind(b"[") < 4:
        text = raw.translate(None, b" \t\r\n").decode()
        if text.startswith("[[") and text.endswith("]]"):
            text = text[1:-1]
        if text.rfind("[") == 0 and text.find("]") == len(text) - 1:
            return TokenIds(text)
    return raw.decode()


def marks(body: bytes) -> int:
    """Quotes, commas, and brackets and braces that open: about two for each value, also of those in texts.

    >>> marks(b'{"a": [1, "b, c"]}')
    8
    """
    return len(body.translate(None, _NO_MARKS))


def marks_in_texts(fields: Any, enough: int) -> int:
    """How many marks are inside the prompt's texts; looks no further where it found ``enough``.

    ``fields``: of ``read_fields``.

    >>> message = b'{"role": "user", "content": [{"type": "text", "text": "a, b"}]}'
    >>> fields = read_fields(b'{"messages": [' + message + b", " + message + b'], "prompt": "[,"}')
    >>> marks_in_texts(fields, 100)
    4
    """
    found = 0
    try:
        for name in ("prompt", "instructions", "messages", "input"):
            raw = getattr(fields, name)
            if raw is not None and found < enough:
                found += _in_texts(bytes(raw), enough - found)
    except msgspec.DecodeError:
        return 0
    return found


def _in_texts(raw: bytes, enough: int) -> int:
    opening = raw[:1]
    if opening == b'"':
        return marks(raw) - 2
    if opening == b"{":
        items = [_item_decoder.decode(raw)]
    elif opening == b"[" and raw[1:64].lstrip()[:1] == b"{":
        items = _items_decoder.decode(raw)
        if len(items) > MOST_ITEMS:
            return 0
    else:
        return 0
    found = 0
    for item in items:
        for name in _TEXTS:
            text = getattr(item, name)
            if text is not None:
                found += _in_texts(bytes(text), enough - found)
        if found >= enough:
            break
    return found
