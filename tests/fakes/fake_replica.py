"""One fake replica with a fault menu, on a real socket: it answers each request by a plan of steps.

A plan is a list of steps (``Send``, ``Wait``, ``Close``, ``Reset``, ``Hang``). Plans are taken from
``plans`` in order, then ``default`` is used. What came in, and which connections the router broke, is
counted, so that a test can wait for what must happen instead of sleeping.
"""

import asyncio
import json
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Plan = Sequence["Step"]


_GONE = (ConnectionError, RuntimeError)
"""What writing to a connection that the router broke raises; uvloop's transports raise the second."""


@dataclass(frozen=True, slots=True)
class Send:
    """Write these bytes, in one piece."""

    data: bytes


@dataclass(frozen=True, slots=True)
class SendByteByByte:
    """Write these bytes one at a time, each in its own turn of the loop."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when the test sets ``gate``."""

    gate: asyncio.Event


@dataclass(frozen=True, slots=True)
class Close:
    """Close in good order (FIN)."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Close by RST."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Keep the socket open and say nothing more, until the router leaves."""


Step = Send | SendByteByByte | Wait | Close | Reset | Hang


@dataclass(slots=True)
class SeenRequest:
    """One request as it arrived."""

    method: bytes
    target: bytes
    fields: list[tuple[bytes, bytes]]
    """Names in lower case, values as they came."""
    body: bytes
    raw_head: bytes

    def field(self, name: str) -> str | None:
        """The one value of a header; None when it is absent. Fails when it is there twice."""
        values = [value for key, value in self.fields if key == name.encode()]
        assert len(values) <= 1, (name, values)
        return values[0].decode("latin-1") if values else None


def head(status: int = 200, reason: str = "OK", **fields: str) -> bytes:
    """An answer's head. Underscores in names stand for dashes."""
    lines = [f"HTTP/1.1 {status} {reason}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def sized(body: bytes, status: int = 200, reason: str = "OK", **fields: str) -> bytes:
    """An answer whose body has a Content-Length."""
    fields.setdefault("content_type", "application/json")
    return head(status, reason, **fields, content_length=str(len(body))) + body


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
DONE_EVENT = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str | None, *, finish: str | None = None, role: str | None = None) -> bytes:
    """A chat completion chunk as an event."""
    content: dict[str, str] = {}
    if role is not None:
        content["role"] = role
    if text is not None:
        content["content"] = text
    choice = {"index": 0, "delta": content, "finish_reason": finish}
    return event(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    )


def usage_event(prompt: int, output: int, cached: int) -> bytes:
    """The usage event that ends a stream with ``include_usage``."""
    return event(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    )


STREAM_HEAD = head(content_type="text/event-stream; charset=utf-8", transfer_encoding="chunked")


def stream(*events: bytes, done: bool = True) -> bytes:
    """A whole event stream, each event one chunk."""
    events = (*events, DONE_EVENT) if done else events
    return STREAM_HEAD + b"".join(chunk(one) for one in events) + LAST_CHUNK


def completion(text: str = "hello", prompt: int = 10, output: int = 1, cached: int = 0) -> bytes:
    """The JSON of a chat completion."""
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }
    ).encode()


def openai_plan(request: SeenRequest) -> Plan:
    """What a healthy replica answers: a completion, streamed if asked for."""
    try:
        streamed = json.loads(request.body).get("stream") is True
    except (ValueError, AttributeError, RecursionError):
        streamed = False
    if streamed:
        return [
            Send(
                stream(
                    delta("", role="assistant"),
                    delta("hel"),
                    delta("lo"),
                    delta(None, finish="stop"),
                    usage_event(10, 2, 4),
                )
            )
        ]
    return [Send(sized(completion()))]


PROBED = frozenset(
    {b"/health", b"/v1/models", b"/metrics", b"/server_info", b"/get_server_info", b"/props", b"/info"}
)


def healthy(probe: SeenRequest) -> Plan:
    """What the router's probes are answered by a healthy replica that serves the model ``m``."""
    if probe.target == b"/v1/models":
        return [
            Send(sized(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()))
        ]
    return [Send(sized(b""))]


@dataclass
class FakeReplica:
    """A replica that misbehaves on demand."""

    default: Callable[[SeenRequest], Plan] | Plan = openai_plan
    plans: deque[Plan] = field(default_factory=deque)
    requests: list[SeenRequest] = field(default_factory=list)
    """What came in, but for probes."""
    probe: Callable[[SeenRequest], Plan] | Plan = healthy
    """How a GET of one of ``PROBED`` is answered, whatever ``plans`` has."""
    probes: list[SeenRequest] = field(default_factory=list)
    connections: int = 0
    """Ever accepted."""
    open_connections: int = 0
    answering: int = 0
    """Requests whose plan is under way."""
    aborted: int = 0
    """Requests whose connection the router closed before their plan was over."""
    sent_bytes: int = 0
    port: int = 0
    close_idle: bool = False
    """Close the connection after each whole answer, without announcing it (the keep-alive race)."""
    tls: ssl.SSLContext | None = None
    takes_chunks: bool = False
    """Requests may come in chunks: Envoy sends them so, our own proxy never does."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Where the router finds it."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the port it had, after a ``kill``."""
        self._server = await asyncio.start_server(
            self._accept,
            "127.0.0.1",
            self.port,
            limit=1 << 26,
            backlog=4096,
            reuse_address=True,
            ssl=self.tls,
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Die as by SIGKILL: every connection is reset, nobody listens."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            _reset(writer)
        await self._cancel_tasks()

    async def stop(self) -> None:
        """End of the test."""
        await self.kill()

    async def _cancel_tasks(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        self._writers.add(writer)
        try:
            while True:
                request = await _read_request(reader, takes_chunks=self.takes_chunks)
                if request is None:
                    return
                if request.method == b"GET" and request.target in PROBED:
                    self.probes.append(request)
                    plan = self.probe(request) if callable(self.probe) else self.probe
                    if not await self._follow(plan, reader, writer):
                        return
                    continue
                self.requests.append(request)
                if self.plans:
                    plan = self.plans.popleft()
                else:
                    plan = self.default(request) if callable(self.default) else self.default
                self.answering += 1
                try:
                    if not await self._follow(plan, reader, writer) or self.close_idle:
                        return
                finally:
                    self.answering -= 1
        except (*_GONE, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            self._writers.discard(writer)
            writer.close()

    async def _follow(self, plan: Plan, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer by ``plan``; False when the connection is over."""
        loop = asyncio.get_running_loop()
        router_left = loop.create_task(reader.read(1))
        steps = loop.create_task(self._steps(plan, writer))
        try:
            await asyncio.wait({router_left, steps}, return_when=asyncio.FIRST_COMPLETED)
            if not steps.done() or isinstance(steps.exception(), _GONE):
                self.aborted += 1
                return False
            return steps.result()
        finally:
            for task in (router_left, steps):
                task.cancel()
            await asyncio.gather(router_left, steps, return_exceptions=True)

    async def _steps(self, plan: Plan, writer: asyncio.StreamWriter) -> bool:
        for step in plan:
            match step:
                case Send(data):
                    writer.write(data)
                    await writer.drain()
                    self.sent_bytes += len(data)
                case SendByteByByte(data):
                    for at in range(len(data)):
                        writer.write(data[at : at + 1])
                        await asyncio.sleep(0)
                case Wait(gate):
                    await gate.wait()
                case Hang():
                    await asyncio.Event().wait()
                case Close():
                    return False
                case Reset():
                    await asyncio.sleep(0)
                    _reset(writer)
                    return False
        return True


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


async def _read_request(reader: asyncio.StreamReader, *, takes_chunks: bool) -> SeenRequest | None:
    """One request, read strictly: the router's output is under test, too."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        assert not error.partial, error.partial
        return None
    lines = raw[:-4].split(b"\r\n")
    method, target, version = lines[0].split(b" ")
    assert version == b"HTTP/1.1", lines[0]
    fields = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        assert colon and name and name.strip() == name, line
        fields.append((name.lower(), value.strip()))
    lengths = [value for name, value in fields if name == b"content-length"]
    if (b"transfer-encoding", b"chunked") in fields and takes_chunks and not lengths:
        return SeenRequest(method, target, fields, await _read_chunks(reader), raw)
    assert not any(name == b"transfer-encoding" for name, _ in fields), fields
    assert len(lengths) <= 1, fields
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return SeenRequest(method, target, fields, body, raw)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    assert await reader.readexactly(2) == b"\r\n", "no trailers"
    return b"".join(pieces)
