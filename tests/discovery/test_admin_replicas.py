"""Adding and removing replicas through the admin port, and what it must not be used for."""

import asyncio
import json
import logging
from typing import Any

import pytest

from router.config import parse_config
from router.config_errors import ConfigError
from router.discovery_config import AdminReplicasConfig
from router.proxy.allowed_hosts import NotAllowed, require_allowed
from tests.discovery.changing_fleet import names, run, traffic, until_there_are
from tests.fakes.fake_replica import Send
from tests.fakes.proxy_rig import until
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_rig import RouterRig

LOOPBACK = {"allow": ["127.0.0.0/8"]}


async def add(rig: RouterRig, **entry: Any) -> RawAnswer:
    return await rig.admin("/replicas", "POST", json.dumps(entry).encode())


async def remove(rig: RouterRig, name: str) -> RawAnswer:
    return await rig.admin(f"/replicas/{name}", "DELETE")


def message(answer: RawAnswer) -> str:
    return str(answer.json()["error"]["message"])


def test_replicas_are_added_and_removed_while_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: RouterRig) -> None:
        async with traffic(rig):
            assert (await add(rig, **rig.entry(1, weight=3))).status == 200
            await until_there_are(rig, "r0", "r1")
            assert (await rig.fleet())["r1"]["weight"] == 3
            await rig.reload(rig.entry(0, weight=2))
            assert names(rig) == {"r0", "r1"}
            for again in (rig.entry(1), rig.entry(2) | {"name": "r1"}, rig.entry(0) | {"name": "other"}):
                answer = await add(rig, **again)
                assert answer.status == 400 and "is there already" in message(answer)
            forged = await add(rig, **rig.entry(2) | {"name": "r2\nfrom 10.0.0.1: replica r0 removed"})
            assert forged.status == 400 and "printable" in message(forged)
            assert (await remove(rig, "r0")).status == 409
            assert (await remove(rig, "r9")).status == 404
            assert (await remove(rig, "r1")).status == 200
            await until_there_are(rig, "r0")
        lines = [record.getMessage() for record in caplog.records if record.name == "warmroute.audit"]
        assert lines[0].startswith("from 127.0.0.1: replica r1 (http://127.0.0.1:")
        assert lines[-1] == "from 127.0.0.1: replica r1 removed"
        assert len(lines) == 8 and not any("\n" in line for line in lines)

    caplog.set_level(logging.INFO)
    run(scenario, admin_replicas=LOOPBACK)


def test_a_name_is_resolved_once_and_kept_by_its_address() -> None:
    async def scenario(rig: RouterRig) -> None:
        port = rig.replicas[1].port
        answer = await add(rig, url=f"http://127.1:{port}")
        assert answer.json() == {"replica": f"127.1:{port}", "url": f"http://127.0.0.1:{port}", "added": True}
        await until_there_are(rig, "r0", f"127.1:{port}")

    run(scenario, admin_replicas=LOOPBACK)


def test_without_admin_replicas_nothing_is_added() -> None:
    async def scenario(rig: RouterRig) -> None:
        for answer in (await add(rig, **rig.entry(1)), await remove(rig, "r0")):
            assert answer.status == 403 and "admin_replicas.allow" in message(answer)
        assert names(rig) == {"r0"}

    run(scenario)


@pytest.mark.parametrize(
    ("entry", "status", "words"),
    [
        ({"url": "http://169.254.169.254"}, 403, "metadata"),
        ({"url": "http://2852039166"}, 403, "metadata"),
        ({"url": "http://[::ffff:169.254.169.254]:80"}, 403, "metadata"),
        ({"url": "http://192.0.2.1:8000"}, 403, "not in admin_replicas.allow"),
        ({"url": "http://[::1]:8000"}, 403, "not in admin_replicas.allow"),
        ({"url": "http://u:p@127.0.0.1:8000"}, 400, "credentials"),
        ({"url": "file:///etc/passwd"}, 400, "http://HOST:PORT"),
        ({"url": "http://127.0.0.1:8000/v1"}, 400, "without a path"),
        (
            {"url": "http://127.0.0.1:8000", "api_key": {"file": "/etc/passwd"}},
            400,
            "api_key: not taken here",
        ),
        ({"url": "http://127.0.0.1:8000", "kv_events": "tcp://10.0.0.1:1"}, 400, "kv_events: not taken here"),
        ({"url": "https://127.0.0.1:8000", "tls": {"ca": "/etc/passwd"}}, 400, "tls: not taken here"),
        ({"url": "http://127.0.0.1:8000", "model": "${HOME}"}, 400, "only secrets"),
        ({"url": "http://h.invalid:8000"}, 403, "has no address"),
        ({}, 400, "url"),
    ],
)
def test_B013_hosts_that_are_not_allowed_are_refused(entry: dict[str, Any], status: int, words: str) -> None:
    async def scenario(rig: RouterRig) -> None:
        answer = await add(rig, **entry)
        assert (answer.status, words in message(answer)) == (status, True), answer.body
        assert [one.name for one in rig.router.fleet.replicas] == ["r0"]

    if entry.get("url", "").endswith(".invalid:8000"):

        async def nobody(host: str, port: int, limit_s: float) -> list[str]:
            return []

        run(_resolved_by(scenario, nobody), admin_replicas=LOOPBACK)
    else:
        run(scenario, admin_replicas=LOOPBACK)


def _resolved_by(scenario: Any, resolve: Any) -> Any:
    async def inner(rig: RouterRig) -> None:
        rig.router.added._resolve = resolve
        await scenario(rig)

    return inner


def test_B013_a_replica_that_redirects_is_not_followed() -> None:
    async def scenario(rig: RouterRig) -> None:
        there = rig.replicas[2]
        elsewhere = f"HTTP/1.1 307 Go\r\nlocation: {there.url}/health\r\ncontent-length: 0\r\n\r\n".encode()
        rig.replicas[1].probe = [Send(elsewhere)]
        assert (await add(rig, **rig.entry(1))).status == 200
        await until(lambda: len(rig.replicas[1].probes) > 3)
        assert not there.probes and names(rig) == {"r0"}
        rig.replicas[0].default = [Send(elsewhere)]
        await rig.ask()
        assert not there.requests

    run(scenario, admin_replicas=LOOPBACK)


def test_the_admin_keys_guard_these_routes() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await add(rig, **rig.entry(1))).status == 401
        assert (await remove(rig, "r0")).status == 401
        body = json.dumps(rig.entry(1)).encode()
        answer = await rig.admin("/replicas", "POST", body, authorization="Bearer wrong")
        assert answer.status == 401
        answer = await rig.admin("/replicas", "POST", body, authorization="Bearer right")
        assert answer.status == 200

    run(scenario, admin_replicas=LOOPBACK, keys={"admin": ["right"]})


def _refusal(host: str, found: list[str], *allow: str) -> str | None:
    try:
        require_allowed(host, found, AdminReplicasConfig(allow=allow))
    except NotAllowed as error:
        return str(error)
    return None


def test_every_address_of_a_host_must_be_allowed() -> None:
    assert _refusal("a.pods", ["10.0.0.1", "10.2.3.4"], "10.0.0.0/8") is None
    assert _refusal("a.pods", ["10.0.0.1", "8.8.8.8"], "10.0.0.0/8") is not None
    assert _refusal("A.pods", ["8.8.8.8"], "*.pods") is None
    assert _refusal("pods.evil", ["8.8.8.8"], "*.pods") is not None
    assert "name its network" in (_refusal("a.pods", ["127.0.0.1"], "*.pods") or "")
    assert _refusal("a.pods", ["127.0.0.1"], "*.pods", "127.0.0.0/8") is None
    assert "name its network" in (_refusal("a.pods", ["::1"], "*.pods") or "")
    for metadata in (
        "169.254.169.254",
        "fe80::1%eth0",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "::169.254.169.254",
        "::ffff:0:a9fe:a9fe",
        "fd00:ec2::254",
        "2002:a9fe:a9fe::",
    ):
        assert "metadata" in (_refusal("a.pods", [metadata], "*.pods", "0.0.0.0/0", "::/0") or ""), metadata


@pytest.mark.parametrize("allow", [[], ["10.0.0.1/8"], ["*"], ["*.*"]])
def test_an_allow_list_that_allows_too_much_is_an_error(allow: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"admin_replicas\.allow"):
        parse_config({"admin_replicas": {"allow": allow}}, "x")


def test_a_name_that_cannot_be_resolved_is_said() -> None:
    async def late(host: str, port: int, limit_s: float) -> list[str]:
        await asyncio.sleep(0)
        raise TimeoutError

    async def scenario(rig: RouterRig) -> None:
        answer = await add(rig, url="http://h.example:1")
        assert answer.status == 400 and "h.example cannot be resolved: no answer" in message(answer)

    run(_resolved_by(scenario, late), admin_replicas=LOOPBACK)
