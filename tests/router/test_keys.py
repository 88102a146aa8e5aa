"""Who may use the two ports, and what keys replicas see."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.admin_client import KEY_VARIABLE, ask_admin
from router.config import RouterConfig, parse_config
from router.config_errors import ConfigError
from tests.fakes.fake_replica import Hang, Send, head
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_rig import RouterRig, with_router
from warmroute import main

KEYS = {"public": ["sk-new", "sk-old"], "admin": ["sk-admin"]}
PATHS = ("/v1/chat/completions", "/v1/models", "/v1/files/x", "/nowhere", "/v1/../fleet")
OPEN = ("/health", "/readiness")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def refusal(answer: RawAnswer) -> tuple[int, str]:
    assert answer.status != 401 or answer.field("www-authenticate") == "Bearer"
    return answer.status, answer.error["code"]


REFUSED: list[tuple[dict[str, str], tuple[int, str]]] = [
    ({}, (401, "missing_api_key")),
    ({"Authorization": "sk-new"}, (401, "missing_api_key")),
    ({"Authorization": "Basic sk-new"}, (401, "missing_api_key")),
    ({"Api_Key": "sk-new"}, (401, "missing_api_key")),
    (bearer("sk-ne"), (401, "invalid_api_key")),
    (bearer(""), (401, "invalid_api_key")),
    (bearer("sk-new, Bearer sk-old"), (401, "invalid_api_key")),
    (bearer("sk-admin"), (403, "wrong_port")),
]


@pytest.mark.parametrize(("given", "expected"), REFUSED)
def test_B013_without_a_key_of_the_public_port_nothing_is_served(
    given: dict[str, str], expected: tuple[int, str]
) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for path in PATHS:  # one connection: a refusal does not cost it
            await client.post(CHAT, path, **given)
            assert refusal(await client.answer()) == expected
        for path in OPEN:
            assert (await rig.ask(b"", path, method="GET", **given)).status == 200
        assert not rig.replica.requests
        assert rig.counters.errors == {expected[1]: len(PATHS)}

    with_rig(scenario, keys=KEYS)


def test_B086_any_of_several_keys_opens_the_port_and_no_replica_sees_it() -> None:
    async def scenario(rig: Rig) -> None:
        for given in (bearer("sk-new"), bearer("sk-old"), {"Authorization": "bearer  sk-old "}):
            assert (await rig.ask(**given)).status == 200
        for request in rig.replica.requests:
            assert request.field("authorization") is None and b"sk-" not in request.raw_head

    with_rig(scenario, keys=KEYS)


def test_the_key_is_looked_at_before_the_body_comes() -> None:
    async def scenario(rig: Rig) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 50000000\r\n"
        for more in (b"\r\n", b"Expect: 100-continue\r\n\r\n", b"\r\n" + b"x" * 100_000):
            client = await rig.client()
            await client.send(head + more)
            assert refusal(await client.answer()) == (401, "missing_api_key")
        client = await rig.client()
        await client.send(head + b"Authorization: Bearer sk-new\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.head()).status == 100

    with_rig(scenario, keys=KEYS)


def test_a_key_on_one_connection_says_nothing_of_the_next_request() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for key, status in (("sk-new", 200), ("sk-none", 401), ("sk-new", 200)):
            await client.post(CHAT, **bearer(key))
            assert (await client.answer()).status == status

    with_rig(scenario, keys=KEYS)


def test_B013_the_admin_port_wants_its_own_keys() -> None:
    async def scenario(rig: RouterRig) -> None:
        for path, method in (
            *((path, "GET") for path in ("/fleet", "/metrics", "/config", "/nowhere", "//fleet")),
            *((path, "POST") for path in ("/explain", "/reload", "/drain/r0")),
        ):
            for given, code in (
                ({}, "missing_api_key"),
                (bearer("sk-none"), "invalid_api_key"),
                (bearer("sk-new"), "wrong_port"),
            ):
                answer = await rig.admin(path, method, **given)
                assert answer.json()["error"]["code"] == code and answer.status in (401, 403)
        assert (await rig.admin("/health")).status == 200
        assert (await rig.admin("/fleet", **bearer("sk-admin"))).status == 200
        assert not rig.router.fleet.replicas[0].draining

    with_router(scenario, keys=KEYS)


def test_commands_ask_the_admin_port_with_a_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(rig: RouterRig) -> None:
        url = f"http://{rig.router.admin.address}/fleet"
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(
            OSError, match=f"answered 401: This port wants a key.*; set {KEY_VARIABLE} to a key"
        ):
            await asyncio.to_thread(ask_admin, url)
        monkeypatch.setenv(KEY_VARIABLE, "sk-admin")
        assert b'"replicas"' in await asyncio.to_thread(ask_admin, url)

    with_router(scenario, keys=KEYS)


def test_keys_are_replaced_by_a_reload() -> None:
    async def scenario(rig: RouterRig) -> None:
        client = await rig.client()
        await client.post(CHAT, **bearer("sk-old"))
        assert (await client.answer()).status == 200
        rig.next_config = rig.config_with(keys={"public": ["sk-newer"], "admin": ["sk-admin-2"]})
        assert (await rig.admin("/reload", "POST", **bearer("sk-admin"))).status == 200
        await client.post(CHAT, **bearer("sk-old"))
        assert (await client.answer()).status == 401
        await client.post(CHAT, **bearer("sk-newer"))
        assert (await client.answer()).status == 200
        assert (await rig.admin("/fleet", **bearer("sk-admin"))).status == 401
        assert (await rig.admin("/fleet", **bearer("sk-admin-2"))).status == 200

    with_router(scenario, keys=KEYS)


def test_B086_each_replica_gets_its_own_key_in_requests_and_probes() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.reload(
            rig.entry(0, api_key="sk-r0"), rig.entry(1), rig.entry(2, api_key="sk-r2"), api_key="sk-all"
        )
        for replica in rig.replicas:
            replica.probes.clear()
            replica.requests.clear()
        for _ in range(6):
            await rig.ask(**bearer("sk-client"))
        for replica, key in zip(rig.replicas, ("sk-r0", "sk-all", "sk-r2"), strict=True):
            await until(lambda replica=replica: len(replica.probes) > 4)  # type: ignore[misc]
            assert len(replica.requests) == 2
            for request in (*replica.requests, *replica.probes[2:]):
                assert request.field("authorization") == f"Bearer {key}"

    with_router(scenario, replicas=3)


def test_probes_follow_no_redirect_with_a_replicas_key() -> None:
    async def scenario(rig: RouterRig) -> None:
        elsewhere = f"{rig.replicas[1].url}/health"
        rig.replicas[0].probe = [Send(head(302, "Found", location=elsewhere, content_length="0"))]
        await rig.reload(rig.entry(0, api_key="sk-r0"))
        await rig.until_health("r0", "ejected")
        assert all(probe.field("authorization") is None for probe in rig.replicas[1].probes)

    with_router(scenario, replicas=2)


def test_a_clients_key_goes_only_where_there_is_no_other() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.reload(rig.entry(0, api_key="sk-r0"), rig.entry(1), forward_client_key=True)
        for _ in range(4):
            await rig.ask(**bearer("sk-client"))
        assert {one.field("authorization") for one in rig.replicas[0].requests} == {"Bearer sk-r0"}
        assert {one.field("authorization") for one in rig.replicas[1].requests} == {"Bearer sk-client"}

    with_router(scenario, replicas=2)


def test_a_retry_carries_the_second_replicas_key() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.reload(rig.entry(0, api_key="sk-r0"), rig.entry(1, api_key="sk-r1"))
        for replica in rig.replicas:
            replica.default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: sum(replica.answering for replica in rig.replicas) == 1)
        first = rig.replicas[0] if rig.replicas[0].answering else rig.replicas[1]
        await first.kill()
        await until(lambda: all(replica.requests for replica in rig.replicas))
        keys = [replica.requests[0].field("authorization") for replica in rig.replicas]
        assert keys == ["Bearer sk-r0", "Bearer sk-r1"]

    with_router(scenario, replicas=2)


# --- where keys come from -------------------------------------------------------------------------


def parsed(**keys: Any) -> RouterConfig:
    return parse_config({"replicas": [{"url": "http://h:1"}]} | keys, "router.yaml")


def test_keys_come_from_the_environment_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTER_KEY", "sk-env")
    (tmp_path / "key").write_text("sk-file\n")
    file = {"file": str(tmp_path / "key")}
    config = parsed(keys={"public": ["${ROUTER_KEY}", file, "sk-here"], "admin": "sk-admin"}, api_key=file)
    assert [key.get_secret_value() for key in config.keys.public] == ["sk-env", "sk-file", "sk-here"]
    assert [key.get_secret_value() for key in config.keys.admin] == ["sk-admin"]
    assert config.api_key is not None and config.api_key.get_secret_value() == "sk-file"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"api_key": "${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE is not set"),
        ({"api_key": {"file": "/nowhere/key"}}, "/nowhere/key cannot be read"),
        ({"api_key": {"fil": "sk-secret"}}, "${VARIABLE} or {file: PATH}"),
        ({"api_key": 12345678}, "${VARIABLE} or {file: PATH}"),
        ({"api_key": "sk-secret two"}, "without spaces"),
        ({"api_key": "sk-secret\r\nX: y"}, "in one line"),
        ({"api_key": ""}, "at least one"),
        ({"keys": "sk-secret"}, "keys: "),
        ({"keys": {"public": ["sk-secret", 12345678]}}, "keys.public.1"),
        ({"keys": {"public": ["sk-secret"], "admin": ["sk-secret"]}}, "must not be an admin key"),
        (
            {"keys": {"publik": ["sk-secret"]}},
            "keys.publik: unknown key, is it public?",
        ),
        ({"replicas": [{"url": "http://h:1", "api_key": "sk-secret é"}]}, "replicas.0.api_key"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_without_the_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**keys)
    assert says in str(caught.value)
    assert "sk-secret" not in str(caught.value) and "12345678" not in str(caught.value)


def test_check_masks_every_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTER_KEY", "sk-secret-env")
    path = tmp_path / "router.yaml"
    path.write_text(
        "api_key: sk-secret-1\nkeys: {public: ['${ROUTER_KEY}'], admin: [sk-secret-2]}\n"
        "replicas: [{url: 'http://h:1', api_key: sk-secret-3}]\n"
    )
    assert main(["serve", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "sk-secret" not in shown and shown.count("**********") == 4
    path.write_text("api_key: sk-secret-1: x\nreplicas: [\n")  # not even YAML
    assert main(["serve", str(path), "--check"]) == 2
    error = capsys.readouterr().err
    assert "sk-secret" not in error and "line 1" in error
