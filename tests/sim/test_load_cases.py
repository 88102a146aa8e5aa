"""Bug cases of load testing, by id: what a harness must not do. Cases of trace files: test_trace_file.py."""

import asyncio
import json
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sim.bench.load import streams
from sim.bench.mock_replica import TICK_S, MockReplica
from sim.bench.prompts import chat_body
from sim.bench.routers import Router, find_rivals, ours
from sim.bench.started_router import start_router
from sim.demo.processes import ChildProcesses, free_ports
from sim.replay import ReplaySettings, replay
from sim.results import Result
from sim.results_table import client_warning
from sim.workload.prompt_text import PromptText
from sim.workload.trace import Trace, TraceRequest
from sim.workload.trace_file import read_trace
from tests.fakes.router_process import RouterProcess, router_process
from tests.sim.fake_openai import Body, FakeOpenAI
from tests.sim.test_replay import command, run, short
from tests.sim.traces import timed

PAUSE = (0.3, 1.3)
"""Seconds after the first request in which the server answers nobody."""


class PausingServer(FakeOpenAI):
    """Stops once, as a replica that collects garbage does."""

    async def _answer(self, request, number: int, body: Body):  # type: ignore[no-untyped-def]
        since = time.perf_counter() - self.came_s[0]
        if PAUSE[0] <= since < PAUSE[1]:
            await asyncio.sleep(PAUSE[1] - since)
        return await super()._answer(request, number, body)


HIT = 0.7
"""Of a prompt whose first block is known."""


class CachingServer(FakeOpenAI):
    """Remembers the first block of every prompt it has seen, over all runs. A prompt takes ``cold_s``."""

    def __init__(self, cold_s: float = 0.0) -> None:
        super().__init__()
        self._cold_s = cold_s
        self._seen: set[str] = set()
        self.cached_share = self._hit

    async def _answer(self, request, number: int, body: Body):  # type: ignore[no-untyped-def]
        known = self._head(body) in self._seen
        await asyncio.sleep((1.0 - HIT * known) * self._cold_s)
        return await super()._answer(request, number, body)

    def _hit(self, body: Body) -> float:
        known = self._head(body) in self._seen
        self._seen.add(self._head(body))
        return HIT * known

    def _head(self, body: Body) -> str:
        return str(body["messages"][0]["content"][: 512 * 4])


def test_B029_a_second_run_is_not_answered_from_the_first_ones_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seed twice on one server, whose cache outlives a run: a salt for each, the same hit share."""
    rows = [
        {"timestamp": k, "input_length": 700, "output_length": 1, "hash_ids": [k % 20, 100 + k]}
        for k in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = CachingServer()

    def told(*arguments: str) -> dict[str, Any]:
        assert command(server, "--trace", str(path), "--warmup", "0", "--json", *arguments) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert isinstance(row, dict) and row["seed"] == 1
        return row

    first, second = told(), told()
    assert first["salt"] != second["salt"] and 0.3 < first["cached_share"] < 0.4
    assert second["cached_share"] == pytest.approx(first["cached_share"], rel=0.03)
    again = told("--salt", first["salt"])  # who wants the first run's cache must ask for it
    assert again["cached_share"] > 0.6


async def ready(router: RouterProcess) -> None:
    """Wait until every replica of it gets requests."""
    async with asyncio.timeout(20.0), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"http://{router.admin}/fleet") as answer:
                if all(replica["health"] == "healthy" for replica in (await answer.json())["replicas"]):
                    return
            await asyncio.sleep(0.02)


def test_B029_the_order_of_two_policies_changes_nothing(tmp_path: Path) -> None:
    """Round robin then prefix-aware, and the other way round, on the same replicas with the same seed.

    Each request waits for the answer before it: how many meet, and spill, is up to the machine. And it takes
    time as it does in earnest: what costs nothing may as well be computed elsewhere.
    """
    turns = tuple(TraceRequest(700, 1, (k % 9,), session="s", think_ms=0.0) for k in range(81))

    async def measured(order: Sequence[str], folder: Path) -> dict[str, Result]:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(CachingServer(0.03).running()) for _ in range(2)]
            done: dict[str, Result] = {}
            for policy in order:
                (own := folder / policy).mkdir()
                async with router_process(own, urls, policy={"kind": policy}) as router:
                    await ready(router)
                    settings = ReplaySettings(
                        url=f"http://{router.address}", model="fake-model", salt=secrets.token_hex(4)
                    )
                    trace = Trace("turns", 512, turns)
                    done[policy] = (await replay(trace, replace(settings, warmup_share=0.0))).result
            return done

    kinds = ("round_robin", "predicted_finish")

    async def both() -> tuple[dict[str, Result], dict[str, Result]]:
        (one := tmp_path / "one").mkdir()
        (other := tmp_path / "other").mkdir()
        return await asyncio.gather(measured(kinds, one), measured(kinds[::-1], other))

    first, second = asyncio.run(both())
    for kind in kinds:
        one, other = first[kind], second[kind]
        assert one.errors == other.errors == 0 and one.cached_share is not None
        assert other.cached_share == pytest.approx(one.cached_share, rel=0.03)
    assert (first[kinds[1]].cached_share or 0.0) > (first[kinds[0]].cached_share or 0.0)


@asynccontextmanager
async def _null_server() -> AsyncIterator[str]:
    """A server that costs the sender nothing: another process, whose one token comes within a tick."""
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "sim.bench.mock_replica", str(port))
    try:
        async with asyncio.timeout(20.0):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def test_B050_a_run_tells_its_senders_own_load_and_marks_what_is_over_its_limit() -> None:
    """The load on a null server is raised: it answers as fast as ever, the sender is what gives way."""
    rates = (20.0, 200.0, 1e6)
    counts = (10, 100, 2000)

    async def scenario() -> list[Result]:
        results = []
        async with _null_server() as url:
            for rate, count in zip(rates, counts, strict=True):
                settings = ReplaySettings(url=url, model="m", salt="s", warmup_share=0.0)
                trace = short(count, gap_ms=1e3 / rate, output_tokens=1)
                results.append((await replay(trace, settings)).result)
        return results

    results = asyncio.run(scenario())
    calm, _, over = results
    assert [one.errors for one in results] == [0, 0, 0]
    shares = [one.client_cpu_share or 0.0 for one in results]
    assert shares == sorted(shares) and not calm.client_limited
    assert over.client_limited and shares[2] > 4 * shares[1], shares
    assert "MARKED" in (client_warning(results) or "") and client_warning([calm]) is None
    ceiling, achieved = over.client_ceiling_per_s, over.requests / over.wall_s
    assert ceiling is not None and 0.2 * ceiling <= achieved <= 1.2 * ceiling < rates[2]
    assert (over.send_lag_p99_s or 0.0) > 0.1 > (calm.send_lag_p99_s or 0.0), "it tells how late it was"
    told = over.json_object()
    assert told["client_limited"] and not calm.json_object()["client_limited"]
    assert {"client_cpu_share", "client_ceiling_per_s", "send_lag_p99_s"} <= told.keys()


def test_B050_the_command_prints_the_mark(capsys: pytest.CaptureFixture[str]) -> None:
    """Server and sender in one process, asked for everything at once: it cannot be in time."""
    assert command(FakeOpenAI(), "--requests", "200", "--speed", "1e9", "--warmup", "0") == 0
    said = capsys.readouterr().out
    assert "MARKED: the sender used over 70% of its core or sent over 100 ms late" in said
    assert re.search(r"its own ceiling is about [\d,]+ requests a second", said)


def test_B059_a_pause_shows_in_an_open_loop_and_hides_in_a_closed_one() -> None:
    """100 arrivals in 2 s, and 2 users who ask as soon as they are answered; the server stops for 1 s.

    The case's pause of 10 s in 60, six times as often and a tenth as long: half of the open loop meets it,
    and 2 of the closed loop's 400.
    """
    opened = run(PausingServer(), short(100, gap_ms=20.0, output_tokens=1)).result
    sessions = Trace(
        "users",
        512,
        tuple(
            replace(one, timestamp_ms=None, session=str(number % 2), think_ms=0.0)
            for number, one in sorted(enumerate(short(400).requests), key=lambda pair: pair[0] % 2)
        ),
    )
    closed = run(PausingServer(), sessions, speed=50.0).result
    assert opened.requests == 100 and opened.errors == closed.errors == 0, "no arrival is left out"
    assert opened.ttft_s.p99 is not None and closed.ttft_s.p99 is not None
    assert opened.ttft_s.p99 > 0.9, "a request that came early in the pause waited nearly all of it"
    assert closed.ttft_s.p99 < 0.5, "two slow answers among four hundred"


def test_B059_arrivals_over_the_limit_in_flight_are_told() -> None:
    """50 come in the pause and 10 may be in flight: the rest is not sent, and is no silent gap."""
    done = run(PausingServer(), short(100, gap_ms=20.0, output_tokens=1), max_in_flight=10).result
    assert done.requests == 100 and 30 <= done.errors <= 45
    assert done.error_kinds == (("not sent: 10 were in flight", done.errors),)
    assert done.json_object()["error_kinds"] == dict(done.error_kinds)
    assert done.ttft_s.p99 is not None and done.ttft_s.p99 > 0.9


def test_B059_a_session_that_may_not_begin_is_left_out_whole(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [replace(one, timestamp_ms=None, think_ms=0.0) for one in short(6).requests]
    sessions = tuple(replace(one, session=str(number // 3)) for number, one in enumerate(turns))
    server = FakeOpenAI()
    server.content_after_s = 0.3
    done = run(server, Trace("users", 512, sessions), speed=1e3, max_in_flight=1).result
    assert done.error_kinds == (("not sent: 1 were in flight", 3),) and len(server.received) == 3
    arguments = ("--requests", "40", "--speed", "1e9", "--warmup", "0", "--max-in-flight", "30")
    assert command(server, *arguments) == 0
    assert "10 x not sent: 30 were in flight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("one", "other"),
    [(7, 7 + (1 << 32)), (-1, (1 << 32) - 1), (2**53, 2**53 + 1), (2**64 - 1, 2**32 - 1)],
)
def test_B087_ids_that_differ_in_any_of_64_bits_are_different_prompts(
    one: int, other: int, tmp_path: Path
) -> None:
    row = {"timestamp": 0, "input_length": 512, "output_length": 1}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row | {"hash_ids": [block]}) + "\n" for block in (one, other, one)))
    trace = read_trace(path)
    text = PromptText(trace.block_tokens, salt="s")
    first, second, third = (text.prompt(request.block_ids, 512, "rest") for request in trace.requests)
    assert first == third != second
    assert not {first[at : at + 64] for at in range(0, 2048, 64)} & {
        second[at : at + 64] for at in range(0, 2048, 64)
    }


@pytest.mark.parametrize("tokens_per_event", [1, 2, 8])
def test_B115_tokens_come_from_usage_and_the_first_content_is_the_first_token(tokens_per_event: int) -> None:
    server = FakeOpenAI()  # an event that only names the role comes first, usage last
    server.tokens_per_event = tokens_per_event
    server.content_after_s = 0.15
    done = run(server, short(6, output_tokens=16)).result
    assert done.tokens_per_event == done.json_object()["tokens_per_event"] == tokens_per_event
    assert done.ttft_s.p50 is not None and done.ttft_s.p50 >= 0.15
    assert done.tpot_ms.mean is not None and done.e2e_s.mean is not None and done.ttft_s.mean is not None
    assert done.tpot_ms.mean == pytest.approx((done.e2e_s.mean - done.ttft_s.mean) / 15 * 1e3)


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_B116_bursts_come_as_recorded_at_any_speed(speed: float) -> None:
    gaps_ms = {1.0: 300.0, 10.0: 3_000.0}[speed]
    rows = [(burst * gaps_ms + number, 10, 1, ()) for burst in range(3) for number in range(8)]
    server = FakeOpenAI()
    done = run(server, timed(rows), speed=speed).result
    assert (done.requests, done.errors, len(server.came_s)) == (len(rows), 0, len(rows))
    assert done.send_lag_p99_s is not None
    slack_s = done.send_lag_p99_s + 0.1
    came = sorted(server.came_s)
    intended = [row[0] / 1e3 / speed for row in rows]
    assert all(abs((at - came[0]) - due) <= slack_s for at, due in zip(came, intended, strict=True))


@asynccontextmanager
async def _relay(port: int, every_s: float) -> AsyncIterator[int]:
    """Between client and server: passes on what came from the server once in ``every_s``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)

        async def up() -> None:
            while data := await reader.read(65536):
                to_server.write(data)

        going_up = asyncio.create_task(up())
        while data := await from_server.read(1 << 20):
            writer.write(data)
            if every_s:
                await asyncio.sleep(every_s)
        going_up.cancel()
        writer.close()
        to_server.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def test_B131_a_proxy_that_collects_events_is_seen_by_the_replicas_stamps() -> None:
    async def scenario() -> None:
        replica = await asyncio.get_running_loop().create_server(MockReplica().connection, "127.0.0.1", 0)
        port = replica.sockets[0].getsockname()[1]
        bodies = [chat_body(1, 2, 15, stream=True)]
        async with replica, _relay(port, 0.0) as passing, _relay(port, 5 * TICK_S) as collecting:
            direct, through, clumped = [
                await streams(one, bodies, 4, 15) for one in (port, passing, collecting)
            ]
        assert direct.events == through.events == clumped.events == 60
        assert clumped.clumped >= 30 > 2 * max(direct.clumped, through.clumped)
        assert clumped.delay_p99_ms > 2 * TICK_S * 1e3 > 0.0 < direct.delay_p99_ms
        assert clumped.delay_p99_ms > 2 * through.delay_p99_ms

    asyncio.run(scenario())


def _collecting(nginx: Router) -> Router:
    """``nginx`` that buffers and compresses streams: they come in one piece."""

    def command(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
        line = nginx.command(program, port, replicas, folder)
        config = folder / "nginx.conf"
        compress = "access_log off; gzip on; gzip_types text/event-stream; gzip_min_length 0;"
        text = config.read_text().replace("access_log off;", compress)
        config.write_text(text.replace("proxy_buffering off", "proxy_buffering on"))
        return line

    return Router("nginx that collects", nginx.program, command)


def test_B131_replay_flags_a_proxy_that_collects_and_not_the_router(tmp_path: Path) -> None:
    """A replica with a cadence of 20 ms: directly, through this router, and through nginx that passes on or
    collects, where nginx is installed."""
    nginx = [one for one in find_rivals(None)[0] if one.name.startswith("nginx")]
    routers = [ours(), *nginx, *map(_collecting, nginx)]

    async def scenario() -> list[Result]:
        async with _null_server() as url:
            with ChildProcesses(tmp_path) as children:
                urls = [url]
                for number, router in enumerate(routers):
                    (folder := tmp_path / str(number)).mkdir()
                    started = await start_router(router, [url], children, folder)
                    urls.append(f"http://127.0.0.1:{started.port}")
                trace = short(8, gap_ms=7.0, output_tokens=15)
                settings = [ReplaySettings(url=one, model="mock", salt="s", warmup_share=0.0) for one in urls]
                return [(await replay(trace, one)).result for one in settings]

    results = asyncio.run(scenario())
    assert not any(one.errors for one in results)
    direct, passing, collecting = results[0], results[1 : 2 + len(nginx)], results[2 + len(nginx) :]
    assert not any(one.json_object()["clumped"] for one in (direct, *passing))
    for one in collecting:
        assert one.json_object()["clumped"] and (one.clumped_share or 0.0) > 0.5
        assert (one.tpot_ms.mean or 0.0) < (direct.tpot_ms.mean or 0.0) / 2, "this looks better"
        assert (one.ttft_s.p50 or 0.0) > 4 * (direct.ttft_s.p50 or 0.0), "and is not"
