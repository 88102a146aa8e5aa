"""Load on one router: requests in a closed loop, by wrk where it is installed, or many streams at once."""

import asyncio
import math
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import cast

import httptools

from sim.bench.mock_replica import TICK_S
from sim.bench.prompts import chat_request

STREAMS_LIMIT_S = 120.0
CONTENT_EVENT = b'"content":'
CLUMPED_NS = int(TICK_S / 2 * 1e9)
_SENT = re.compile(rb'"sent_ns":"(\d{20})"')
WRK_LEAST_S = 1.0
"""wrk counts in whole seconds."""

_WRK_SCRIPT = """
local requests = {}
function init(args)
  for path in io.lines("%s") do
    local body = io.open(path, "rb"):read("*a")
    local headers = {["content-type"] = "application/json"}
    requests[#requests + 1] = wrk.format("POST", "/v1/chat/completions", headers, body)
  end
end
local at = 0
function request()
  at = at %% #requests + 1
  return requests[at]
end
"""


class LoadError(Exception):
    """The load could not be made, or nothing was answered."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back: whole answers with status 200, others, and over how many seconds."""

    answers: int
    failed: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came back of streams: events with content, those that are missing, and over how many seconds."""

    events: int
    lost: int
    wall_s: float
    delays_ms: Sequence[float] = ()
    """From the replica's sending an event to its arrival here, sorted; both read the machine's one clock."""
    clumped: int = 0
    """Events that came in one piece with the next, though the replica sent that a tick later or more."""

    @property
    def delay_p99_ms(self) -> float:
        """0 without events."""
        return self.delays_ms[int(len(self.delays_ms) * 0.99)] if self.delays_ms else 0.0


def wrk_path(seconds: float) -> str | None:
    """Where wrk is, if it is installed and can run for ``seconds``."""
    return shutil.which("wrk") if seconds >= WRK_LEAST_S else None


async def closed_loop(
    port: int, bodies: Sequence[bytes], connections: int, seconds: float, folder: Path
) -> Answered:
    """Ask on ``connections`` connections, each as soon as it has its answer. Raises ``LoadError``.

    ``folder`` is where wrk's files go.
    """
    wrk = wrk_path(seconds)
    if wrk is None:
        return await _own_loop(port, bodies, connections, seconds)
    return await asyncio.to_thread(_wrk_loop, wrk, port, bodies, connections, seconds, folder)


def _wrk_loop(
    wrk: str, port: int, bodies: Sequence[bytes], connections: int, seconds: float, folder: Path
) -> Answered:
    size = len(bodies[0])
    names, script = folder / f"bodies-{size}.txt", folder / f"wrk-{size}.lua"
    if not script.exists():
        paths = [folder / f"body-{size}-{number}.json" for number in range(len(bodies))]
        for path, body in zip(paths, bodies, strict=True):
            path.write_bytes(body)
        names.write_text("\n".join(map(str, paths)), encoding="utf-8")
        script.write_text(_WRK_SCRIPT % names, encoding="utf-8")
    duration = math.ceil(seconds)
    command = [
        wrk,
        "-t1",
        f"-c{connections}",
        f"-d{duration}s",
        "-s",
        str(script),
        f"http://127.0.0.1:{port}",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=duration + 60)
    total = re.search(r"(\d+) requests in ([\d.]+)(s|m)", run.stdout)
    if total is None:
        raise LoadError(
            f"wrk did not say how many requests it sent: {(run.stderr or run.stdout).strip()[-300:]}"
        )
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", run.stdout)
    failed = int(bad[1]) if bad else 0
    wall_s = float(total[2]) * (60.0 if total[3] == "m" else 1.0)
    return Answered(int(total[1]) - failed, failed, wall_s)


class _Asker(asyncio.Protocol):
    """One connection that asks again and again until it is told to stop."""

    def __init__(self, requests: "cycle[bytes]") -> None:
        self._requests = requests
        self._parser = httptools.HttpResponseParser(self)
        self._asking = True
        self.answers = self.failed = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.failed += 1
            self._transport.abort()

    def on_message_complete(self) -> None:
        """From the parser."""
        if self._parser.get_status_code() == 200:
            self.answers += 1
        else:
            self.failed += 1
        if self._asking:
            self._transport.write(next(self._requests))
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        """No more requests after the one under way."""
        self._asking = False


async def _own_loop(port: int, bodies: Sequence[bytes], connections: int, seconds: float) -> Answered:
    loop = asyncio.get_running_loop()
    requests = cycle([chat_request(body) for body in bodies])
    began = loop.time()
    askers: list[_Asker] = []
    try:
        for _ in range(connections):
            _, asker = await loop.create_connection(partial(_Asker, requests), "127.0.0.1", port)
            askers.append(asker)
        await asyncio.sleep(seconds)
        for asker in askers:
            asker.stop()
        await asyncio.wait_for(asyncio.gather(*(asker.ended for asker in askers)), seconds + 60.0)
    except (OSError, TimeoutError) as error:
        raise LoadError(f"port {port} of loopback does not answer: {error or 'timeout'}") from None
    wall_s = loop.time() - began
    return Answered(sum(one.answers for one in askers), sum(one.failed for one in askers), wall_s)


class _Listener(asyncio.Protocol):
    """One stream, whose events are counted."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._end = b""
        self.events = 0
        self.delays_ms: list[float] = []
        self.clumped = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._timed(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_body(self, body: bytes) -> None:
        """From the parser. An event may be cut anywhere."""
        text = self._end + body
        self.events += text.count(CONTENT_EVENT)
        self._end = text[-len(CONTENT_EVENT) + 1 :]

    def _timed(self, data: bytes) -> None:
        """When the events in ``data``, one read, were sent; one that is cut there is left out."""
        now = time.monotonic_ns()
        sent = [int(one) for one in _SENT.findall(data)]
        self.delays_ms += [(now - one) / 1e6 for one in sent]
        self.clumped += sum(after - before >= CLUMPED_NS for before, after in pairwise(sent))

    def on_message_complete(self) -> None:
        """From the parser."""
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def streams(port: int, bodies: Sequence[bytes], count: int, events: int) -> Streamed:
    """Open ``count`` streams of ``events`` events each at once, and hear them out. Raises ``LoadError``."""
    loop = asyncio.get_running_loop()
    requests = [chat_request(body) for body in bodies]
    began = loop.time()
    listeners: list[_Listener] = []
    try:
        for number in range(count):
            request = requests[number % len(requests)]
            _, listener = await loop.create_connection(partial(_Listener, request), "127.0.0.1", port)
            listeners.append(listener)
        await asyncio.wait_for(asyncio.gather(*(one.ended for one in listeners)), STREAMS_LIMIT_S)
    except (OSError, TimeoutError) as error:
        raise LoadError(f"streams on port {port} of loopback did not end: {error or 'timeout'}") from None
    got = sum(one.events for one in listeners)
    delays = sorted(delay for one in listeners for delay in one.delays_ms)
    clumped = sum(one.clumped for one in listeners)
    return Streamed(got, count * events - got, loop.time() - began, delays, clumped)
