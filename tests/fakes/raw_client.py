"""A client that writes raw bytes and reads answers strictly, and says whether they were whole."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 10.0


@dataclass(slots=True)
class RawAnswer:
    """One answer as it arrived."""

    status: int
    reason: str
    fields: list[tuple[str, str]]
    body: bytes
    whole: bool
    """Its framing was complete; False when the connection broke before."""
    chunks: list[bytes] = field(default_factory=list)
    trailers: bytes = b""

    def field(self, name: str) -> str | None:
        """The one value of a header; None when it is absent. Fails when it is there twice."""
        values = [value for key, value in self.fields if key == name]
        assert len(values) <= 1, (name, values)
        return values[0] if values else None

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The router's error; fails unless it has the OpenAI shape."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        assert self.field("content-type") == "application/json"
        assert self.field("x-request-id") in error["message"]
        assert isinstance(error, dict)
        return error


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.limit_s = LIMIT_S
        """How long to wait for anything."""

    @classmethod
    async def connect(cls, address: str, *, read_ahead: int = 1 << 26) -> "RawClient":
        """Connect to HOST:PORT or unix:/path. ``read_ahead``: bytes taken before anybody asks for them."""
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            return cls(*await asyncio.open_unix_connection(path, limit=read_ahead))
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=read_ahead))

    async def send(self, data: bytes) -> None:
        """Write."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(
        self,
        body: bytes | dict[str, Any],
        path: str = "/v1/chat/completions",
        *,
        method: str = "POST",
        http10: bool = False,
        **fields: str,
    ) -> None:
        """Write one request with a Content-Length."""
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.{0 if http10 else 1}", "Host: router"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)

    async def answer(self, *, to_head: bool = False) -> RawAnswer:
        """Read one answer, its head and its body."""
        async with asyncio.timeout(self.limit_s):
            head = await self.head()
            return await self._body(head, to_head=to_head)

    async def head(self) -> RawAnswer:
        """Read one head; the body is left."""
        async with asyncio.timeout(self.limit_s):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw[:-4].decode("latin-1").split("\r\n")
        version, status, reason = lines[0].split(" ", 2)
        assert version == "HTTP/1.1"
        fields = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            assert colon and name.strip() == name, line
            fields.append((name.lower(), value.strip()))
        return RawAnswer(int(status), reason, fields, b"", whole=False)

    async def _body(self, answer: RawAnswer, *, to_head: bool) -> RawAnswer:
        length, coding = answer.field("content-length"), answer.field("transfer-encoding")
        assert length is None or coding is None
        if to_head or answer.status in (204, 304) or answer.status < 200:
            answer.whole = True
        elif coding is not None:
            assert coding == "chunked"
            while (piece := await self.chunk()) is not None:
                if piece == b"":
                    answer.whole = True
                    break
                answer.chunks.append(piece)
            answer.body = b"".join(answer.chunks)
        elif length is not None:
            try:
                answer.body = await self.reader.readexactly(int(length))
                answer.whole = True
            except asyncio.IncompleteReadError as error:
                answer.body = error.partial
            except ConnectionError:
                pass
        else:
            answer.body, answer.whole = await self.rest()
        return answer

    async def chunk(self) -> bytes | None:
        """One chunk's data; b"" for the last, None when the connection broke."""
        try:
            async with asyncio.timeout(self.limit_s):
                line = await self.reader.readuntil(b"\r\n")
                size = int(line[:-2].split(b";")[0], 16)
                if not size:
                    while await self.reader.readuntil(b"\r\n") != b"\r\n":
                        pass
                    return b""
                data = await self.reader.readexactly(size + 2)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def rest(self) -> tuple[bytes, bool]:
        """Everything until the connection ends; True when it ended in good order."""
        pieces = []
        try:
            async with asyncio.timeout(self.limit_s):
                while piece := await self.reader.read(65536):
                    pieces.append(piece)
        except ConnectionError:
            return b"".join(pieces), False
        return b"".join(pieces), True

    async def closed(self) -> bool:
        """The router closed the connection and sent nothing more."""
        rest, _ = await self.rest()
        return rest == b""

    def leave(self) -> None:
        """Go away at once."""
        self.writer.transport.abort()
