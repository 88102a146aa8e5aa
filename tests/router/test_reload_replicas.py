"""Replicas that a reload adds, takes out or changes, with requests on the way."""

import asyncio

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Hang,
    Send,
    Wait,
    chunk,
    delta,
    head,
    healthy,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig
from tests.router.reloading import in_fleet, join, metrics, run


def test_a_replica_that_is_added_is_probed_and_gets_traffic() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replicas[1].probe = [Wait(gate), Send(sized(b""))]
        await rig.reload(rig.entry(0), rig.entry(1))
        assert (await rig.fleet())["r1"]["health"] == "unknown"
        assert await rig.answered_by() == {"r0"}
        rig.replicas[1].probe = healthy
        gate.set()
        await rig.until_health("r1", "healthy")
        assert await rig.answered_by() == {"r0", "r1"}
        assert 'warmroute_replica_up{replica="r1"} 1.0' in await metrics(rig)

    run(scenario, health={"interval_s": 0.05, "timeout_s": 10.0})


def test_B031_B091_a_replica_that_is_removed_finishes_and_leaves_nothing() -> None:
    async def scenario(rig: RouterRig) -> None:
        await join(rig)
        gate = asyncio.Event()
        rig.replicas[1].default = [
            Send(STREAM_HEAD + chunk(delta("a"))),
            Wait(gate),
            Send(chunk(DONE_EVENT) + LAST_CHUNK),
        ]
        streams = [await rig.client() for _ in range(2)]
        for client in streams:
            await client.post(CHAT_STREAM)
        (stream,) = [one for one in streams if (await one.head()).field("x-warmroute-replica") == "r1"]
        assert await stream.chunk() == delta("a")
        await rig.reload(rig.entry(0))
        assert await rig.answered_by() == {"r0"}
        fleet = await rig.fleet()
        assert [(name, state["leaving"]) for name, state in fleet.items()] == [("r0", False), ("r1", True)]
        assert (await rig.admin("/drain/r1", "POST")).status == 404
        gate.set()
        assert await stream.chunk() == DONE_EVENT and await stream.chunk() == b""
        await until(lambda: in_fleet(rig) == ["r0"])
        await until(lambda: rig.replicas[1].open_connections == 0)
        probes, rounds = len(rig.replicas[1].probes), len(rig.replicas[0].probes)
        await until(lambda: len(rig.replicas[0].probes) > rounds + 6)
        page = await metrics(rig)
        assert "r1" not in page and 'replica="r0"' in page
        assert len(rig.replicas[1].probes) == probes

    run(scenario)


def test_an_answer_kept_from_a_replica_that_has_left_is_passed_on() -> None:
    """r1 refuses, r0 is tried, r1 is removed and forgotten; then r0 fails: r1's refusal is all there is."""

    async def scenario(rig: RouterRig) -> None:
        await join(rig)
        assert (await rig.ask()).field("x-warmroute-replica") == "r0"  # the next is r1's
        first, then = asyncio.Event(), asyncio.Event()
        refusal = head(503, "Full", content_length="4")
        rig.replicas[1].default = [Send(refusal + b"no"), Wait(then), Send(b"ne")]
        rig.replicas[0].default = [Wait(first), Close()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: len(rig.replicas[0].requests) == 2)
        await rig.reload(rig.entry(0))
        await until(lambda: in_fleet(rig) == ["r0"])
        first.set()
        then.set()
        answer = await client.answer()
        assert (answer.status, answer.body, answer.whole) == (503, b"none", True)
        await until(lambda: rig.replicas[1].open_connections == 0)

    run(scenario)


def test_another_url_under_the_same_name_is_another_server() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].default = [Wait(gate), Send(sized(b'{"from":"the old one"}'))]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: len(rig.replicas[0].requests) == 1)
        await rig.reload(rig.entry(1) | {"name": "r0"})
        assert in_fleet(rig) == ["r0", "r0"]
        assert (await metrics(rig)).count('warmroute_replica_up{replica="r0"}') == 1
        assert await rig.answered_by() == {"r0"}
        assert len(rig.replicas[0].requests) == 1 and len(rig.replicas[1].requests) == 4
        gate.set()
        assert (await client.answer()).body == b'{"from":"the old one"}'
        await until(lambda: in_fleet(rig) == ["r0"])
        assert 'warmroute_requests_total{replica="r0",status="200"} 5.0' in await metrics(rig)

    run(scenario)


def test_a_namesake_of_a_replica_that_leaves_is_probed_when_doubted() -> None:
    async def scenario(rig: RouterRig) -> None:
        def rounds() -> int:
            return sum(probe.target == b"/health" for probe in rig.replicas[1].probes)

        rig.replicas[0].default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: len(rig.replicas[0].requests) == 1)
        await rig.reload(rig.entry(1) | {"name": "r0"})
        await until(lambda: rounds() == 1)
        rig.router.prober.probe_now("r0")
        await until(lambda: rounds() == 2)
        client.leave()
        await until(lambda: in_fleet(rig) == ["r0"])
        rig.router.prober.probe_now("r0")
        await until(lambda: rounds() == 3)

    run(scenario, health={"interval_s": 60.0})


def test_weight_tags_and_model_change_and_what_was_learned_stays() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.ask()
        (replica,) = rig.router.fleet.replicas
        await rig.reload(rig.entry(0, weight=2.5, tags=["h100"], model="x"))
        (same,) = rig.router.fleet.replicas
        assert same is replica and same.requests == 1
        assert (same.weight, same.spec.tags, same.models) == (2.5, ("h100",), {"x"})
        shown = (await rig.fleet())["r0"]
        assert (shown["weight"], shown["tags"], shown["models"]) == (2.5, ["h100"], ["x"])
        assert (await rig.ask()).status == 404
        await rig.reload(rig.entry(0))
        await until(lambda: replica.models == {"m"})
        assert (await rig.ask()).status == 200

    run(scenario)


def test_a_new_cost_counts_at_once_and_speed_is_learned_anew() -> None:
    async def scenario(rig: RouterRig) -> None:
        for _ in range(8):
            await rig.ask()
        (replica,) = rig.router.fleet.replicas
        assert replica.cost.prefills_seen == 8
        slow = {"prefill_fixed_ms": 100, "prefill_us_per_token": 1_000, "attention_tokens": 1e9}
        await rig.reload(rig.entry(0), cost=slow)
        assert replica.cost.prefills_seen == 0
        assert replica.cost.prefill_s(400, 0) == pytest.approx(0.5, rel=1e-6)
        await rig.reload(rig.entry(0, cost={"decode_step_ms": 3, "decode_us_per_sequence": 1_000}), cost=slow)
        assert replica.cost.step_s(2) == pytest.approx(0.005)
        assert replica.cost.prefill_s(400, 0) < 0.1, "its own cost goes before the router's, whole"
        await rig.ask()
        await rig.reload(rig.entry(0, cost={"decode_step_ms": 3, "decode_us_per_sequence": 1_000}), cost=slow)
        assert replica.cost.prefills_seen == 1, "the same word again changes nothing"

    run(scenario)


def test_streams_never_break_while_replicas_come_and_go() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        streams = []
        for replica in rig.replicas:
            replica.default = [
                Send(STREAM_HEAD + chunk(delta("a"))),
                Wait(gate),
                Send(chunk(DONE_EVENT) + LAST_CHUNK),
            ]
        for turn in range(6):
            await rig.reload(rig.entry(turn % 3), slo={"ttft_ms": 100 + turn})
            client = await rig.client()
            await client.post(CHAT_STREAM)
            assert (await client.head()).status == 200
            assert await client.chunk() == delta("a")
            streams.append(client)
        gate.set()
        for client in streams:
            assert await client.chunk() == DONE_EVENT and await client.chunk() == b""
        await until(lambda: len(in_fleet(rig)) == 1)

    run(scenario, replicas=3)
