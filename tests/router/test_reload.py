"""A changed config on a running router: applied whole or not at all, and no request in flight notices."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.assembly import Router
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    FakeReplica,
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
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_process import router_process
from tests.fakes.router_rig import RouterRig, with_router

QUICK_SWEEP = {"client_header_s": 0.2, "replica_keepalive_s": 60.0}
CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "cert.pem"


def run(scenario: Callable[[RouterRig], Awaitable[None]], **options: Any) -> None:
    """With two replicas, of which the first config has r0 alone."""
    defaults = {"replicas": 2, "known": 1, "expose_routing": True, "timeouts": QUICK_SWEEP}
    with_router(scenario, **{**defaults, **options})  # type: ignore[arg-type]


async def join(rig: RouterRig, number: int = 1) -> None:
    """``replicas[number]`` joins r0, and is well."""
    await rig.reload(rig.entry(0), rig.entry(number))
    await rig.until_health(f"r{number}", "healthy")


def in_fleet(rig: RouterRig) -> list[str]:
    """Names of those there are, those on their way out included."""
    return [replica.name for replica in rig.router.fleet.replicas]


async def metrics(rig: RouterRig) -> str:
    return (await rig.admin("/metrics")).body.decode()


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


def test_policy_slo_limits_and_health_change() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await rig.ask()).field("x-warmroute-reason") == "only"
        await join(rig)
        await rig.reload(
            rig.entry(0),
            rig.entry(1),
            policy={"kind": "predicted_finish"},
            slo={"ttft_ms": 250},
            limits={"body_bytes": 100},
            timeouts=QUICK_SWEEP | {"first_byte_s": 0.05},
            retries={"attempts": 1},
            health={"interval_s": 0.05, "failures_to_eject": 7},
        )
        fleet = rig.router.fleet
        assert (await rig.ask()).field("x-warmroute-reason") in ("cold", "warm", "spill", "balanced")
        assert fleet.settings.hold and fleet.settings.slo_ttft_s == 0.25
        assert all(replica.health.settings.failures_to_eject == 7 for replica in fleet.replicas)
        assert (await rig.ask(b'{"prompt":"' + b"x" * 100 + b'"}')).status == 413
        for replica in rig.replicas:
            replica.default = [Hang()]
        assert (await rig.ask()).error["code"] == "first_byte_timeout"

    run(scenario)


def test_requests_in_flight_keep_what_they_began_with() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].default = [Wait(gate), Send(sized(b"{}"))]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: len(rig.replicas[0].requests) == 1)
        await rig.reload(rig.entry(0), timeouts=QUICK_SWEEP | {"first_byte_s": 0.01})
        other = await rig.client()
        await other.post(CHAT)
        assert (await other.answer()).error["code"] == "first_byte_timeout"
        gate.set()
        answer = await client.answer()
        assert (answer.status, answer.field("x-warmroute-replica")) == (200, "r0")

    run(scenario)


def test_whose_turn_it_is_survives() -> None:
    async def scenario(rig: RouterRig) -> None:
        await join(rig)
        order = []
        for _ in range(6):
            order.append((await rig.ask()).field("x-warmroute-replica"))
            await rig.reload(rig.entry(0), rig.entry(1))
        assert order[:2] * 3 == order and len(set(order)) == 2

    run(scenario)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listen", "127.0.0.1:1"),
        ("admin", "127.0.0.1:1"),
        ("seed", 2),
        ("tls", {"cert": str(CERTIFICATE), "key": str(CERTIFICATE.with_name("key.pem"))}),
    ],
)
def test_what_cannot_change_is_named_and_nothing_is_applied(key: str, value: object) -> None:
    async def scenario(rig: RouterRig) -> None:
        answer = await rig.try_reload(rig.entry(0), rig.entry(1), slo={"ttft_ms": 5}, **{key: value})
        assert answer.status == 400
        assert f"{key}: cannot be changed while the router runs" in answer.json()["error"]["message"]
        assert in_fleet(rig) == ["r0"] and rig.router.fleet.settings.slo_ttft_s == 1.0
        assert (await rig.ask()).status == 200
        await join(rig)  # the next good one is applied
        page = await metrics(rig)
        assert "warmroute_config_reloads_total 1.0" in page
        assert "warmroute_config_reload_failures_total 1.0" in page

    run(scenario)


def test_a_port_for_events_that_is_taken_leaves_everything_as_it_was() -> None:
    async def scenario(rig: RouterRig) -> None:
        publisher = FakePublisher()
        publisher.listen()
        try:
            events = {"endpoint": publisher.endpoint, "bind": True}
            answer = await rig.try_reload(rig.entry(0), rig.entry(1, kv_events=events), slo={"ttft_ms": 5})
            assert answer.status == 400 and publisher.endpoint in answer.json()["error"]["message"]
            assert rig.router.fleet.settings.slo_ttft_s == 1.0
            await until(lambda: in_fleet(rig) == ["r0"])
        finally:
            publisher.stop()
        await rig.reload(rig.entry(0), rig.entry(1, kv_events="tcp://127.0.0.1:1"))
        assert list(rig.router.kv_events.endpoints) == ["r1"]
        await rig.reload(rig.entry(0))
        assert not rig.router.kv_events.endpoints

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


def test_no_request_fails_while_configs_change() -> None:
    async def scenario(rig: RouterRig) -> None:
        answers: list[RawAnswer] = []
        over = False

        async def keep_asking() -> None:
            client = await rig.client()
            while not over:
                await client.post(CHAT_STREAM if len(answers) % 2 else CHAT)
                answers.append(await client.answer())

        clients = [asyncio.create_task(keep_asking()) for _ in range(8)]
        entries = [rig.entry(number) for number in range(4)]
        for turn in range(24):
            some = [entry | {"weight": 1.0 + turn % 2} for entry in entries[turn % 3 : turn % 3 + 2]]
            kind = ("predicted_finish", "round_robin", "power_of_two")[turn % 3]
            await rig.reload(*some, policy={"kind": kind}, slo={"ttft_ms": 100 + turn})
            seen = len(answers)
            await until(lambda seen=seen: len(answers) > seen + 8)  # type: ignore[misc]
        over = True
        await asyncio.gather(*clients)
        assert {(answer.status, answer.whole) for answer in answers} == {(200, True)}
        assert len({answer.field("x-warmroute-replica") for answer in answers}) == 4
        await until(lambda: len(in_fleet(rig)) == 2)

    run(scenario, replicas=4)


def test_reloads_do_not_refill_the_retry_budget() -> None:
    async def scenario(rig: RouterRig) -> None:
        await join(rig)
        for replica in rig.replicas:
            replica.default = [Send(sized(b"{}", 500, "No"))]
        for _ in range(4):
            await rig.reload(rig.entry(0), rig.entry(1), retries=spare)
            await rig.ask()
        assert rig.router.counters.retries == 1
        await rig.reload(rig.entry(0), rig.entry(1), retries=spare | {"budget_floor": 2})
        await rig.ask()
        assert rig.router.counters.retries == 2

    spare = {"budget_share": 0.0, "budget_floor": 1}
    run(scenario, retries=spare, health={"interval_s": 60.0, "failures_to_eject": 99})


def test_a_reload_waits_for_the_start_and_is_refused_at_the_end() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        replica = FakeReplica(probe=[Wait(gate), Send(sized(b""))])
        await replica.start()
        config = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "replicas": [{"url": replica.url}]}
        router = Router(
            parse_config(config, "old"), lambda: parse_config(config | {"slo": {"ttft_ms": 5}}, "new")
        )
        starting = asyncio.create_task(router.start())
        await until(lambda: len(replica.probes) == 1)
        reloading = asyncio.create_task(router.reload())
        await asyncio.sleep(0)
        assert not reloading.done() and not starting.done()
        gate.set()
        assert (await reloading).slo.ttft_ms == 5
        await starting
        await router.stop()
        with pytest.raises(ConfigError, match="stopping"):
            await router.reload()
        await replica.stop()

    asyncio.run(scenario())


def test_sighup_reloads_a_real_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "router.yaml"
        replica = FakeReplica()
        await replica.start()
        async with router_process(tmp_path, [replica]) as router:
            config = yaml.safe_load(file.read_text())

            async def hup(says: str, **keys: Any) -> None:
                file.write_text(yaml.safe_dump(config | keys))
                router.process.send_signal(signal.SIGHUP)
                await until(lambda: says in "\n".join(router.log))

            kept = f"config not reloaded, the old one stays: {file}: "
            await hup(f"{kept}listen: cannot", listen="127.0.0.1:1")
            absent = str(tmp_path / "absent")
            tenants = {"salt_secret": "s" * 16, "file": absent}
            await hup(f"{kept}tenants.file: {absent} cannot be read", tenants=tenants)
            await hup("config reloaded: policy random, 1 replicas", policy={"kind": "random"})
            router.process.terminate()
            assert await router.exit_code() == 0
        await replica.stop()

    asyncio.run(scenario())
