"""Where a message's body ends, whatever way its bytes are cut: by length, by chunks, at the close.

Each framing is fed raw bytes and answers how many of them belong to the message; the payload inside is
collected for those who ask. Nothing is copied that is not asked for. RFC 9112, sections 6 and 7.
"""

import re
from typing import Final

MAX_SIZE_DIGITS: Final = 15
MAX_SIZE_LINE_BYTES: Final = 4096
MAX_TRAILER_BYTES: Final = 16 * 1024

_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n").match
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n").fullmatch

_HEX_DIGITS: Final = bytes(
    int(chr(byte), 16) if chr(byte) in "0123456789abcdefABCDEF" else 16 for byte in range(256)
)
"""By byte: its value as a hexadecimal digit; 16: it is none."""

_CR: Final = 13
_LF: Final = 10

_SIZE: Final = 0
_DATA: Final = 1
_DATA_END: Final = 2
_TRAILER: Final = 3
_LINE_LIMITS = (MAX_SIZE_LINE_BYTES, 0, 2, MAX_TRAILER_BYTES)


class FramingError(Exception):
    """The body's bytes are not what its head promised."""


class Framing:
    """The common face of the framings."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False
        """The whole body was seen."""

    def take(self, data: bytes, start: int, payload: list[bytes] | None) -> int:
        """Offset after the last byte of ``data[start:]`` that is the body's.

        The payload seen is appended to ``payload``. Raises ``FramingError``.
        """
        raise NotImplementedError


class NoBody(Framing):
    """No bytes at all: HEAD, 204, 304, a length of 0."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.done = True

    def take(self, data: bytes, start: int, payload: list[bytes] | None) -> int:
        """Nothing is the body's."""
        return start


class LengthBody(Framing):
    """So many bytes."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        super().__init__()
        self._left = length
        self.done = length == 0

    def take(self, data: bytes, start: int, payload: list[bytes] | None) -> int:
        """See ``Framing``."""
        size = len(data) - start
        if size < self._left:
            self._left -= size
            end = len(data)
        else:
            end = start + self._left
            self._left = 0
            self.done = True
        if payload is not None:
            whole = not start and end == len(data)
            payload.append(data if whole else data[start:end])
        return end


class UntilCloseBody(Framing):
    """All that comes until the sender closes. ``done`` is set by who sees the close."""

    __slots__ = ()

    def take(self, data: bytes, start: int, payload: list[bytes] | None) -> int:
        """See ``Framing``."""
        if payload is not None:
            payload.append(data[start:] if start else data)
        return len(data)


class ChunkedBody(Framing):
    r"""Chunks, a last chunk of size 0, trailers, an empty line.

    >>> body, payload = ChunkedBody(), []
    >>> data = b"5;x=1\r\nhello\r\n0\r\nA: b\r\n\r\nnext"
    >>> data[body.take(data, 0, payload):], body.done, payload
    (b'next', True, [b'hello'])
    """

    __slots__ = ("_left", "_line", "_state", "_trailer_bytes", "last_chunk_at")

    def __init__(self) -> None:
        super().__init__()
        self._state = _SIZE
        self._left = 0
        self._line = b""
        """The beginning of a line whose end has not come yet."""
        self._trailer_bytes = 0
        self.last_chunk_at: int | None = None
        """Where in the last ``take``'s data the chunk of size 0 began, if it began there."""

    @property
    def at_boundary(self) -> bool:
        """Between two chunks: another one could be inserted here."""
        return self._state == _SIZE and not self._line

    def take(self, data: bytes, start: int, payload: list[bytes] | None) -> int:
        """See ``Framing``. Raises ``FramingError``."""
        at, size = start, len(data)
        if self._state == _SIZE and not self._line:
            # Whole chunks, one after the other: the usual case.
            while at < size:
                length, begin = 0, at
                last = min(size - 2, at + MAX_SIZE_DIGITS)
                while begin < last:
                    digit = _HEX_DIGITS[data[begin]]
                    if digit > 15:
                        break
                    length = 16 * length + digit
                    begin += 1
                if not length or data[begin] != _CR or data[begin + 1] != _LF:
                    break
                begin += 2
                end = begin + length
                if end + 2 > size or data[end] != _CR or data[end + 1] != _LF:
                    break
                if payload is not None:
                    payload.append(data[begin:end])
                at = end + 2
        return self._take_piecewise(data, at, payload) if at < size else at

    def _take_piecewise(self, data: bytes, at: int, payload: list[bytes] | None) -> int:
        size = len(data)
        self.last_chunk_at = None
        while at < size:
            state = self._state
            if state == _DATA:
                end = min(size, at + self._left)
                if payload is not None:
                    payload.append(data[at:end])
                self._left -= end - at
                at = end
                if not self._left:
                    self._state = _DATA_END
                continue
            began = None if self._line else at
            line, at = self._read_line(data, at, _LINE_LIMITS[state])
            if line is None:
                break
            if state == _SIZE:
                self._read_size(line, began)
            elif state == _DATA_END:
                if line != b"\r\n":
                    raise FramingError("chunk end")
                self._state = _SIZE
            elif line == b"\r\n":
                self.done = True
                break
            else:
                self._trailer_bytes += len(line)
                if self._trailer_bytes > MAX_TRAILER_BYTES or not _TRAILER_LINE(line):
                    raise FramingError("trailer")
        return at

    def _read_size(self, line: bytes, began: int | None) -> None:
        match = _SIZE_LINE(line)
        if match is None:
            raise FramingError("chunk size")
        self._left = int(match[1], 16)
        if self._left:
            self._state = _DATA
        else:
            self._state = _TRAILER
            self.last_chunk_at = began

    def _read_line(self, data: bytes, at: int, limit: int) -> tuple[bytes | None, int]:
        """The line that ends in ``data``, its LF included, or None if it goes on; and the offset after it."""
        end = data.find(b"\n", at, at + limit) + 1
        if not end:
            self._line += data[at:]
            if len(self._line) >= limit or (limit == 2 and self._line != b"\r"):
                raise FramingError("line too long")
            return None, len(data)
        line = self._line + data[at:end]
        self._line = b""
        return line, end
