"""Bug cases of the category overload that no test beside the proxy's own proves."""

import asyncio
from typing import Any

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    SeenRequest,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    sized,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import QUICK_HEALTH, RouterRig, with_router

BUSY = [Send(sized(b'{"error":{"message":"full"}}', 429, "Too Many Requests", retry_after="2"))]
WHOLE = stream(delta("a"), delta(None, finish="stop"))


def _chat(word: str, times: int = 100_000) -> dict[str, Any]:
    """A streamed chat too long to share an engine's step."""
    return {**CHAT_STREAM, "messages": [{"role": "user", "content": word * times}]}


def test_B039_the_only_replica_stays_in_while_it_is_busy() -> None:
    """429 with its Retry-After while it is full, 200 the moment it is not; ``/fleet`` shows it in use."""

    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = BUSY
        for _ in range(10):
            answer = await rig.ask(CHAT)
            assert (answer.status, answer.field("retry-after")) == (429, "2")
        state = (await rig.fleet())["r0"]
        assert (state["health"], state["usable"]) == ("healthy", True)
        rig.replica.default = [Send(sized(completion()))]
        assert (await rig.ask(CHAT)).status == 200

    with_router(scenario)


def test_B039_three_replicas_busy_once_are_all_used_afterwards() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.plans.append(BUSY)
        answer = await rig.ask(CHAT)
        assert answer.status == 429 and answer.field("retry-after") == "2"
        assert [len(replica.requests) for replica in rig.replicas] == [1, 1, 1]
        for _ in range(6):
            assert (await rig.ask(CHAT)).status == 200
        assert [len(replica.requests) for replica in rig.replicas] == [3, 3, 3]

    with_rig(scenario, replicas=3)


def test_B040_a_warm_prefix_leaves_its_dead_replica_with_the_first_request() -> None:
    """Killed between two requests, before any probe: the second is answered by the other, and stays there."""

    async def scenario(rig: Rig) -> None:
        first = await rig.ask(_chat("warm "), connection="close")
        home = int((first.field("x-warmroute-replica") or "")[1:])
        again = await rig.ask(_chat("warm "))
        assert (again.field("x-warmroute-replica"), again.field("x-warmroute-reason")) == (f"r{home}", "warm")
        await rig.replicas[home].kill()
        moved = await rig.ask(_chat("warm "))
        assert (moved.status, moved.whole) == (200, True)
        assert moved.field("x-warmroute-replica") == f"r{1 - home}"
        assert rig.fleet.index.held(home) == 0  # nothing is believed of a dead replica
        await rig.replicas[home].start()
        rig.fleet.probe_succeeded(home, rig.plane.service.clock() + 60.0)
        after = await rig.ask(_chat("warm "))
        assert after.field("x-warmroute-replica") == f"r{1 - home}"

    with_rig(scenario, replicas=2, policy={"kind": "prefix_affinity"}, expose_routing=True)


def test_B053_two_thousand_streams_and_the_router_still_answers_its_probe() -> None:
    """Every one gets its stream, ``/health`` is answered beside them; one connection more is a 503."""
    streams = 2_000

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [
            Send(STREAM_HEAD + chunk(delta("a"))),
            Wait(gate),
            Send(chunk(delta(None, finish="stop")) + chunk(DONE_EVENT) + LAST_CHUNK),
        ]
        clients = [await rig.client() for _ in range(streams)]
        for client in clients:
            await client.post(CHAT_STREAM)
        await until(lambda: rig.replica.answering == streams)
        probe = await rig.client()
        for _ in range(20):
            await probe.post(b"", "/health", method="GET")
            assert (await probe.answer()).status == 200
        refused = await (await rig.client()).answer()
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert refused.field("retry-after") == "1"
        gate.set()
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert {(answer.status, answer.whole) for answer in answers} == {(200, True)}

    with_rig(scenario, limits={"client_connections": streams + 1})


def test_B077_one_runs_five_wait_and_fourteen_are_told_at_once() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = [Hang()]
        clients = [await rig.client() for _ in range(20)]
        for index, client in enumerate(clients):
            await client.post(_chat(f"{index:02d}"))
        await until(lambda: rig.router.counters.errors.get("hold_full") == 14)
        await until(lambda: rig.replica.answering == 1)
        assert rig.router.fleet.held == 5
        answers = [await client.answer() for client in clients[6:]]
        for answer in answers:
            assert (answer.status, answer.error["code"]) == (429, "hold_full")
            assert int(answer.field("retry-after") or 0) > 0
        for client in clients[1:6]:  # whoever waits too long is told so
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (429, "hold_timeout")
            assert "hold.max_wait_s" in answer.error["message"]
        assert len(rig.replica.requests) == 1
        config = (await rig.admin("/config")).json()
        assert (config["hold"]["max_requests"], config["hold"]["max_wait_s"]) == (5, 0.5)

    with_router(scenario, policy={"kind": "predicted_finish"}, hold={"max_requests": 5, "max_wait_s": 0.5})


def test_B077_with_two_replicas_two_run_and_five_wait() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Hang()]
        for index in range(20):
            await (await rig.client()).post(_chat(f"{index:02d}"))
        await until(lambda: rig.counters.errors.get("hold_full") == 13)
        assert (rig.replicas[0].answering, rig.replicas[1].answering, rig.fleet.held) == (1, 1, 5)

    with_rig(scenario, replicas=2, policy={"kind": "predicted_finish"}, hold={"max_requests": 5})


def test_B125_probes_fail_everywhere_while_inference_works() -> None:
    """Refusing everybody cannot be right: panic. When inference fails, too, errors come fast; it recovers."""

    def ill(probe: SeenRequest) -> Any:
        return [Send(sized(b"", 500, "Ill"))]

    async def scenario(rig: RouterRig) -> None:
        well = rig.replica.probe
        for replica in rig.replicas:
            replica.probe = ill
        for name in ("r0", "r1"):
            await rig.until_health(name, "ejected")
        assert (await rig.ask(CHAT)).field("x-warmroute-reason") == "panic"
        page = (await rig.admin("/metrics")).body.decode()
        assert 'warmroute_decisions_total{reason="panic",replica="' in page
        assert 'warmroute_replica_ejected{replica="r0"} 1.0' in page
        for replica in rig.replicas:
            await replica.kill()
        assert (await rig.ask(CHAT)).error["code"] == "replica_unreachable"
        for replica in rig.replicas:
            replica.probe = well
            await replica.start()
        for name in ("r0", "r1"):
            await rig.until_health(name, "probation", "healthy")
        answer = await rig.ask(CHAT)
        assert (answer.status, answer.field("x-warmroute-reason") != "panic") == (200, True)

    with_router(scenario, replicas=2, expose_routing=True, health={**QUICK_HEALTH, "max_backoff_s": 0.3})


def test_B039_a_busy_replica_keeps_its_streams_and_its_place() -> None:
    """503 with Retry-After says busy as well; a stream under way on that replica is not touched."""

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(WHOLE[len(STREAM_HEAD) :])]
        )
        streaming = await rig.client()
        await streaming.post(CHAT_STREAM)
        await until(lambda: rig.replica.answering == 1)
        rig.replica.default = [Send(head(503, "Busy", retry_after="1", content_length="0"))]
        for _ in range(5):
            assert (await rig.ask(CHAT)).status == 503
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY
        gate.set()
        assert (await streaming.answer()).whole

    with_rig(scenario)
