"""Server-sent events, incrementally: bytes as they come in, the data of whole events out."""


class EventStream:
    """Collects bytes and gives back the ``data`` of every event that is complete.

    >>> events = EventStream()
    >>> events.feed(b'data: {"a"'), events.feed(b': 1}\\r\\n\\r\\n: a comment\\n\\ndata: [DONE]\\n\\n')
    ([], [b'{"a": 1}', b'[DONE]'])
    """

    __slots__ = ("_data", "_partial")

    def __init__(self) -> None:
        self._partial = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Data of the events that ``received`` completes, in order."""
        lines = (self._partial + received).split(b"\n")
        self._partial = lines.pop()
        complete: list[bytes] = []
        for line in lines:
            if line[-1:] == b"\r":
                line = line[:-1]
            if not line:
                if self._data:
                    complete.append(b"\n".join(self._data))
                    self._data = []
            elif line[:5] == b"data:":
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return complete
