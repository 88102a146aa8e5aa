"""A reload: what changes at once, what stays as it began, what is refused."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.assembly import Router
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.fake_replica import (
    FakeReplica,
    Hang,
    Send,
    Wait,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_process import router_process
from tests.fakes.router_rig import RouterRig
from tests.router.reloading import QUICK_SWEEP, in_fleet, join, metrics, run

CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "cert.pem"


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
