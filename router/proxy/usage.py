"""What an answer's end says of its tokens: the ``usage`` that engines write, or llama.cpp's ``timings``."""

from typing import TYPE_CHECKING, Any, Final

import orjson

from router.routing.in_flight import Usage

if TYPE_CHECKING:
    from mypy_extensions import i64  # compiled, a number of 64 bits in a register; else an int like any other

USUAL_BYTES: Final = 512
"""So near its end an answer mostly has its usage."""
MAX_USAGE_BYTES: Final = 2048
MAX_COLON_BYTES: Final = 16
"""Between the name of an object and its brace."""
TIMINGS_BYTES: Final = 1024
"""So far before a usage its timings may begin."""
MOST_TOKENS: Final = 1 << 40

_USAGE: Final = b'"usage"'
_TIMINGS: Final = b'"timings"'
# Bytes of JSON that ``_plain_usage`` knows.
_SPACE: Final = 0x20
_QUOTE: Final = 0x22
_COMMA: Final = 0x2C
_ZERO: Final = 0x30
_NINE: Final = 0x39
_COLON: Final = 0x3A
_NULL: Final = 0x6E
_U: Final = 0x75
_OPENED: Final = 0x7B
_CLOSED: Final = 0x7D


def usage_at_end(tail: bytes) -> Usage | None:
    """The last usage object in ``tail``, or llama.cpp's timings; the rest of it need not be whole.

    In a string of JSON a quote has a backslash before it: no text can look like this.

    >>> usage_at_end(b'..."usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}')
    Usage(prompt_tokens=9, output_tokens=None, cached_tokens=4)
    >>> usage_at_end(b'..."timings":{"cache_n":236,"prompt_n":1,"predicted_n":35}}')
    Usage(prompt_tokens=237, output_tokens=35, cached_tokens=236)
    """
    at, told = _last_usage(tail), None
    if at >= 0:
        told = _plain_usage(tail, at + len(_USAGE)) or read_usage(_object(tail, at + len(_USAGE)))
        if told is not None and told.cached_tokens is not None:
            return told
    near = tail[at - TIMINGS_BYTES :] if at > TIMINGS_BYTES else tail
    _, name, timings = near.rpartition(_TIMINGS)
    return _with_timings(told, _object(timings, 0)) if name else told


def _last_usage(text: bytes) -> int:
    """Where the last ``_USAGE`` begins; -1: nowhere.

    It is mostly near the end; there bytes are looked at one by one: compiled, that costs half of a call.
    """
    at: i64 = len(text) - len(_USAGE)
    stop: i64 = max(0, at - USUAL_BYTES)
    while at >= stop:
        if text[at] == _QUOTE and text[at + 1] == _U and text[at : at + len(_USAGE)] == _USAGE:
            return at
        at -= 1
    return text.rfind(_USAGE)


def _plain_usage(text: bytes, start: int) -> Usage | None:
    """The usage object that follows its name, which ends at ``start``; None if it must be parsed as any JSON.

    It need not where there are but names, whole numbers, nulls and one level of objects of these, as engines
    write it: that costs a third.
    """
    at: i64 = start
    stop: i64 = min(len(text), at + MAX_USAGE_BYTES)
    number: i64
    byte: i64
    prompt: int | None = None
    output: int | None = None
    cached: int | None = None
    name = outer = b""
    depth: i64 = 0
    while at < stop:
        byte = text[at]
        if byte == _QUOTE and depth:
            opened: i64 = at + 1
            at = opened
            while at < stop and text[at] != _QUOTE:
                at += 1
            name = text[opened:at]
            at += 1
            if at >= stop or text[at] != _COLON:
                break
            if name in (b"input_tokens", b"output_tokens", b"input_tokens_details"):
                break  # two names for one thing: of Responses, or of both
        elif _ZERO <= byte <= _NINE:
            number = byte - _ZERO
            while at + 1 < stop and _ZERO <= text[at + 1] <= _NINE and number < MOST_TOKENS:
                at += 1
                number = 10 * number + text[at] - _ZERO
            if number >= MOST_TOKENS:
                break
            if depth == 1:
                if name == b"prompt_tokens":
                    prompt = number
                elif name == b"completion_tokens":
                    output = number
            elif name == b"cached_tokens" and outer == b"prompt_tokens_details":
                cached = number
        elif byte == _NULL and text[at : at + 4] == b"null":
            at += 3
        elif byte == _OPENED and depth < 2:
            outer = name
            depth += 1
        elif byte == _CLOSED:
            depth -= 1
            if not depth:
                return Usage(prompt, output, cached)
        elif byte != _COMMA and byte != _COLON and byte != _SPACE:
            break
        at += 1
    return None


def _object(text: bytes, at: int) -> Any:
    """The object whose name ends at ``at``, if it is whole."""
    colon, opened, rest = text[at : at + MAX_USAGE_BYTES].partition(b"{")
    if not opened or len(colon) > MAX_COLON_BYTES:
        return None
    found = opened
    open_braces = 1
    while open_braces:
        inside, closed, rest = rest.partition(b"}")
        if not closed:
            return None
        found += inside + closed
        open_braces += inside.count(b"{") - 1
    try:
        return orjson.loads(found)
    except orjson.JSONDecodeError:
        pass
    try:  # an event's JSON may be cut into data lines
        return orjson.loads(found.replace(b"\ndata:", b"\n"))
    except orjson.JSONDecodeError:
        return None


def _with_timings(told: Usage | None, timings: Any) -> Usage | None:
    """What the usage object did not tell of the cache, from llama.cpp's ``timings`` if there are any."""
    if type(timings) is not dict:
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
    fields: dict[str, Any] = usage
    prompt, output = fields.get("prompt_tokens"), fields.get("completion_tokens")
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    return Usage(
        _count(fields.get("input_tokens") if prompt is None else prompt),
        _count(fields.get("output_tokens") if output is None else output),
        _count(details.get("cached_tokens")) if type(details) is dict else None,
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MOST_TOKENS else None
