"""Bug cases of the category discovery/health that no test beside the proxy's own proves."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeReplica,
    Hang,
    Send,
    Step,
    Wait,
    chunk,
    completion,
    delta,
    sized,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.raw_client import RawClient
from tests.fakes.router_process import router_process
from tests.fakes.router_rig import QUICK_HEALTH, RouterRig, with_router


def _dripping(events: int, every_s: float) -> list[Step]:
    """A stream with something every now and then."""
    steps: list[Step] = [Send(STREAM_HEAD)]
    loop = asyncio.get_running_loop()
    for index in range(events):
        gate = asyncio.Event()
        loop.call_later(every_s * index, gate.set)
        steps += [Wait(gate), Send(chunk(delta("a")))]
    return [*steps, Send(chunk(DONE_EVENT) + LAST_CHUNK)]


def test_B046_a_replica_that_streams_but_is_slow_to_answer_probes_stays_in() -> None:
    """Every replica is so busy that probes time out: none is ejected while it makes progress."""

    async def scenario(rig: RouterRig) -> None:
        clients = [await rig.client() for _ in range(3)]
        for replica in rig.replicas:
            replica.default = _dripping(60, 0.02)
            replica.probe = [Hang()]
        for client in clients:
            await client.post(CHAT_STREAM)
        for client in clients:
            assert (await client.answer()).whole
        assert all(len(replica.probes) >= 4 for replica in rig.replicas)  # 3 and more in a row timed out
        states = [replica.health.state for replica in rig.router.fleet.replicas]
        assert states == [HealthState.HEALTHY] * 3
        assert (await rig.ask(b"", "/readiness", method="GET")).status == 200
        for name in ("r0", "r1", "r2"):  # without any work to show, silence is silence
            await rig.until_health(name, "ejected")

    with_router(
        scenario, replicas=3, health={**QUICK_HEALTH, "timeout_s": 0.2}, timeouts={"replica_keepalive_s": 0.1}
    )


def test_B065_every_replica_failed_once_and_all_are_back_one_trial_at_a_time() -> None:
    async def scenario(rig: RouterRig) -> None:
        failing = [Send(sized(b"{}", 500, "No"))]
        for replica in rig.replicas:
            replica.plans.append(failing)
        assert (await rig.ask(CHAT)).status == 500  # tried on both
        for replica in rig.router.fleet.replicas:
            assert replica.health.state is HealthState.EJECTED
        await rig.until_health("r0", "probation")
        await rig.until_health("r1", "probation")
        gate = asyncio.Event()
        for fake in rig.replicas:
            fake.default = [Wait(gate), Send(sized(completion()))]
        trials = [asyncio.create_task(rig.ask(CHAT)) for _ in range(2)]
        await until(lambda: [fake.answering for fake in rig.replicas] == [1, 1])
        # Each has its one trial: no other request goes to either of them before that has ended.
        usable = [replica.usable for replica in rig.router.fleet.replicas]
        assert usable == [False, False]
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*trials)] == [200, 200]
        assert [replica.health.state for replica in rig.router.fleet.replicas] == [HealthState.HEALTHY] * 2

    with_router(scenario, replicas=2, health={**QUICK_HEALTH, "failures_to_eject": 1})


def test_B091_who_waits_on_a_replica_that_falls_silent_is_served_by_another() -> None:
    """A frozen process: connections stay open, nobody answers. Waiting requests move, streams end openly."""

    async def scenario(rig: RouterRig) -> None:
        frozen, well = rig.replicas
        await rig.admin("/drain/r1", "POST")
        frozen.default = lambda request: (
            [Send(STREAM_HEAD + chunk(delta("a"))), Hang()] if b"stream" in request.body else [Hang()]
        )
        waiting = [asyncio.create_task(rig.ask(CHAT)) for _ in range(10)]
        streaming = [await rig.client() for _ in range(10)]
        for client in streaming:
            await client.post(CHAT_STREAM)
            await client.head()
        await until(lambda: frozen.answering == 20)
        await rig.admin("/drain/r1", "DELETE")
        frozen.probe = [Hang()]
        answers = await asyncio.gather(*waiting)
        assert {answer.status for answer in answers} == {200}
        assert len(well.requests) == 10
        for client in streaming:  # what has begun cannot move: it ends openly, by the idle limit
            assert await client.chunk() == delta("a")
            last = await client.chunk()
            assert last is not None and b'"code":"idle_timeout"' in last
            assert await client.chunk() is None

    with_router(scenario, replicas=2, timeouts={"idle_s": 1.5}, health={**QUICK_HEALTH, "timeout_s": 0.1})


def test_B091_a_frozen_replica_that_is_removed_keeps_nobody_waiting() -> None:
    """Removed before anybody noticed that it is frozen: waiting requests move, streams end with an error."""

    async def scenario(rig: RouterRig) -> None:
        frozen, well = rig.replicas
        frozen.default = lambda request: (
            [Send(STREAM_HEAD + chunk(delta("a"))), Hang()] if b"stream" in request.body else [Hang()]
        )
        waiting = [asyncio.create_task(rig.ask(CHAT)) for _ in range(10)]
        stream = await rig.client()
        await stream.post(CHAT_STREAM)
        await stream.head()
        await until(lambda: frozen.answering == 11)
        frozen.probe = [Hang()]
        await rig.reload(rig.entry(1))
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        assert len(well.requests) == 10
        assert await stream.chunk() == delta("a")
        last = await stream.chunk()
        assert last is not None and b'"code":"replica_broken"' in last
        assert await stream.chunk() is None
        await until(lambda: [one.name for one in rig.router.fleet.replicas] == ["r1"])

    with_router(
        scenario,
        replicas=2,
        known=1,
        timeouts={"client_header_s": 0.2},
        health={**QUICK_HEALTH, "timeout_s": 0.1},
    )


def test_B091_nobody_is_cut_where_nobody_else_could_serve() -> None:
    """The only replica is silent for a while and comes back: its requests are answered after all."""

    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        well = rig.replica.probe
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        waiting = asyncio.create_task(rig.ask(CHAT))
        await until(lambda: rig.replica.answering == 1)
        rig.replica.probe = [Hang()]
        await rig.until_health("r0", "ejected")
        rig.replica.probe = well
        await rig.until_health("r0", "probation")
        gate.set()
        assert (await waiting).body == completion()

    with_router(scenario, health={**QUICK_HEALTH, "timeout_s": 0.1}, timeouts={"connect_s": 0.2})


def test_B091_a_drained_replica_finishes_what_it_has() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].default = [Wait(gate), Send(stream(delta("a"), delta(None, finish="stop")))]
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await until(lambda: rig.replicas[0].answering == 1)
        await rig.admin("/drain/r0", "POST")
        for _ in range(4):
            assert (await rig.ask(CHAT)).status == 200
        assert len(rig.replicas[0].requests) == 1
        gate.set()
        assert (await client.answer()).whole
        assert not (await rig.fleet())["r0"]["usable"]

    with_router(scenario, replicas=2)


def _black_holes(count: int) -> list[socket.socket]:
    """Listeners that accept nobody, then the sockets that fill their backlogs; close them all."""
    holes = [socket.create_server(("127.0.0.1", 0), backlog=0) for _ in range(count)]
    fillers = []
    for hole in holes:
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
            fillers.append(filler)
    return [*holes, *fillers]


def test_B145_probes_run_side_by_side_and_cost_no_tokens() -> None:
    """Three black holes among ten: the others are known at once and probed as often as without them."""
    sockets = _black_holes(3)
    dark = [
        {"url": f"http://127.0.0.1:{hole.getsockname()[1]}", "name": f"dark{at}"}
        for at, hole in enumerate(sockets[:3])
    ]

    async def scenario(rig: RouterRig) -> None:
        fleet = {replica.name: replica for replica in rig.router.fleet.replicas}
        assert all(fleet[f"r{index}"].probed for index in range(7))
        # The black holes' first probes have timed out by now. In that time there was more than one round:
        # four questions in the first, two at least in each that follows.
        assert all(fleet[f"dark{at}"].probed and not fleet[f"dark{at}"].serving for at in range(3))
        assert all(len(fake.probes) >= 6 for fake in rig.replicas)
        asked = {(probe.method, probe.target, probe.body) for fake in rig.replicas for probe in fake.probes}
        paths = (b"/health", b"/v1/models", b"/metrics", b"/info")  # the last: unknown engines may be TGI
        assert asked == {(b"GET", path, b"") for path in paths}
        assert not any(fake.requests for fake in rig.replicas)
        assert {(await rig.ask(CHAT)).status for _ in range(10)} == {200}

    try:
        with_router(scenario, replicas=7, others=dark, health={**QUICK_HEALTH, "timeout_s": 0.6})
    finally:
        for one in sockets:
            one.close()


def _streaming_until(gate: asyncio.Event) -> list[Step]:
    return [
        Send(STREAM_HEAD + chunk(delta("a"))),
        Wait(gate),
        Send(chunk(delta(None, finish="stop")) + chunk(DONE_EVENT) + LAST_CHUNK),
    ]


async def _begin_stream(address: str) -> RawClient:
    client = await RawClient.connect(address)
    await client.post(CHAT_STREAM)
    assert (await client.head()).status == 200
    assert await client.chunk() == delta("a")
    return client


def _run(scenario: Callable[[FakeReplica], Awaitable[None]]) -> None:
    async def main() -> None:
        fake = FakeReplica()
        await fake.start()
        try:
            await scenario(fake)
        finally:
            await fake.stop()

    asyncio.run(main())


def test_B031_sigterm_finishes_streams_and_loses_no_request(tmp_path: Path) -> None:
    """Readiness goes first, requests are served for the delay, then the door closes and streams end whole."""

    async def scenario(fake: FakeReplica) -> None:
        gate = asyncio.Event()
        async with router_process(tmp_path, [fake], shutdown_delay_s=0.6) as router:
            fake.default = _streaming_until(gate)
            streams = [await _begin_stream(router.address) for _ in range(20)]
            fake.default = [Send(sized(completion()))]
            router.process.send_signal(signal.SIGTERM)
            ready = 200
            while ready == 200:
                ready = (await router.get("/readiness")).status
            assert ready == 503
            served = 0
            try:
                while True:
                    assert (await router.ask(CHAT)).status == 200  # never a refusal, never half an answer
                    served += 1
            except (ConnectionRefusedError, ConnectionResetError):  # the door is closed, or just closing
                pass
            assert served > 0
            assert router.process.returncode is None
            gate.set()
            for client in streams:
                assert await client.chunk() == delta(None, finish="stop")
                assert await client.chunk() == DONE_EVENT
                assert await client.chunk() == b""
            assert await router.exit_code() == 0
            assert "stopped" in router.log[-1]

    _run(scenario)


def test_B031_a_second_sigterm_exits_at_once(tmp_path: Path) -> None:
    async def scenario(fake: FakeReplica) -> None:
        fake.default = _streaming_until(asyncio.Event())
        async with router_process(tmp_path, [fake], shutdown_timeout_s=60) as router:
            client = await _begin_stream(router.address)  # while it is open the router waits
            router.process.send_signal(signal.SIGTERM)
            await until(lambda: not _accepts(router.address))
            router.process.send_signal(signal.SIGTERM)
            assert await router.exit_code() == 1
            assert any("second signal" in line for line in router.log)
            client.leave()

    _run(scenario)


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_B108_an_endless_stream_and_an_idle_connection_do_not_hold_up_the_exit(tmp_path: Path) -> None:
    """At the deadline the stream ends with an error event and a broken transfer; exit code 0."""

    async def scenario(fake: FakeReplica) -> None:
        fake.default = _streaming_until(asyncio.Event())
        async with router_process(tmp_path, [fake], shutdown_timeout_s=0.5) as router:
            client, idle = await _begin_stream(router.address), await RawClient.connect(router.address)
            router.process.send_signal(signal.SIGTERM)
            assert await idle.closed()
            last = await client.chunk()
            assert last is not None and b'"code":"shutting_down"' in last
            assert await client.chunk() is None
            assert await router.exit_code() == 0
            await until(lambda: fake.aborted == 1)

    _run(scenario)
