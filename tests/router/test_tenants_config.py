"""Where tenants come from: config, a watched file, the environment; and what is said of mistakes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig, parse_config
from router.config_errors import ConfigError
from router.tenants_file import read_tenants
from tests.fakes.fake_replica import (
    STREAM_HEAD,
    Send,
    Wait,
    chunk,
    delta,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router
from tests.fakes.tenants import REST, SECRET, A, B, tenants


def test_a_changed_file_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("- {name: acme, keys: [sk-a]}")

    async def scenario(rig: RouterRig) -> None:
        def replace(text: str) -> None:
            (tmp_path / "next").write_text(text)
            (tmp_path / "next").replace(path)

        client = await rig.client()

        async def status(given: dict[str, str]) -> int:
            await client.post(CHAT, **given)
            return (await client.answer()).status

        assert (await status(A), await status(B)) == (200, 401)
        replace("- {name: acme, keys: [sk-b]}\n- {name: late, keys: [sk-a]}")
        book = rig.router.fleet.tenants
        await until(lambda: "late" in book.quotas)
        assert (await status(A), await status(B)) == (200, 200)
        assert book.quotas["acme"].requests == 2  # the same tenant with another key
        replace("- {name: acme, keys: [sk-b]}\n- {name: acme, keys: [sk-a]}")
        await until(lambda: rig.router.counters.failed_tenant_files == 1)
        assert await status(A) == 200 and len(book) == 3
        replace("- {name: acme, keys: [sk-a], limits: {concurrent: 5}}")
        await until(lambda: "late" not in book.quotas)
        assert book.quotas["acme"].limits.concurrent == 5 and await status(B) == 401
        path.write_text("- {name: acme, keys: [sk-x]}")
        assert (await rig.admin("/reload", "POST")).status == 200  # reads the file, too
        assert await status({"Authorization": "Bearer sk-x"}) == 200
        path.write_text("nobody")
        assert (await rig.admin("/reload", "POST")).status == 400
        assert await status({"Authorization": "Bearer sk-x"}) == 200

    with pytest.raises(AssertionError, match="names must differ; twice: acme"):  # logged once, as an error
        with_router(scenario, tenants={"salt_secret": SECRET, "file": str(path), "interval_s": 0.02})


def test_a_tenant_that_is_taken_out_keeps_what_it_began(tmp_path: Path) -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(REST)]
        client = await rig.client()
        await client.post(CHAT_STREAM, **B)
        assert (await client.head()).status == 200
        await rig.reload(rig.entry(0), tenants=tenants({"name": "acme", "keys": ["sk-a"]}))
        book = rig.router.fleet.tenants
        assert book.quotas["bolt"].in_flight == 1 and (await rig.ask(CHAT, **B)).status == 401
        gate.set()
        while await client.chunk():
            pass
        await until(lambda: book.quotas["bolt"].in_flight == 0)
        await rig.reload(rig.entry(0), tenants=tenants({"name": "acme", "keys": ["sk-a"]}))
        assert list(book.quotas) == list(rig.router.counters.tenants) == ["public", "acme"]
        rig.replica.default = [Send(sized(b"{}"))]
        await rig.reload(rig.entry(0), tenants=None)
        assert (await rig.ask(CHAT)).status == 200 and not book.quotas
        assert (await rig.admin("/fleet")).json()["tenants"] == []

    with_router(scenario, tenants=tenants())


def parsed(**keys: Any) -> RouterConfig:
    config = parse_config({"replicas": [{"url": "http://h:1"}]} | keys, "router.yaml")
    read_tenants(config)
    return config


def test_keys_of_tenants_come_from_the_environment_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KEY", "sk-env")
    (tmp_path / "key").write_text("sk-file\n")
    keys = ["${ACME_KEY}", {"file": str(tmp_path / "key")}, {"key": "sk-batch", "priority": 5}]
    config = parsed(tenants=tenants({"name": "acme", "keys": keys}))
    assert config.tenants is not None
    found = [(one.key.get_secret_value(), one.priority) for one in config.tenants.members[0].keys]
    assert found == [("sk-env", 0), ("sk-file", 0), ("sk-batch", 5)]
    assert "sk-" not in config.model_dump_json() and SECRET not in config.model_dump_json()


MEMBER = {"name": "acme", "keys": ["sk-secret"]}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tenants": {"salt_secret": "sk-secret", "members": [MEMBER]}}, "at least 16 characters"),
        ({"tenants": {"salt_secret": SECRET}}, "expected file or members"),
        ({"tenants": {"members": [MEMBER]}}, "tenants.salt_secret: Field required"),
        ({"tenants": tenants(MEMBER, MEMBER)}, "names must differ; twice: acme"),
        ({"tenants": tenants(MEMBER, {**MEMBER, "name": "b"})}, "acme and b have the same key"),
        ({"tenants": tenants({**MEMBER, "name": "public"})}, "the name public is taken"),
        ({"tenants": tenants({**MEMBER, "name": "a b"})}, "tenants.members.0.name"),
        ({"tenants": tenants({**MEMBER, "weight": 0})}, "tenants.members.0.weight"),
        ({"tenants": tenants({**MEMBER, "limits": {"concurrent": 0}})}, "limits.concurrent"),
        ({"tenants": tenants({**MEMBER, "limits": {"requests": 1}})}, "unknown key"),
        ({"tenants": tenants({**MEMBER, "keys": ["sk-secret two"]})}, "tenants.members.0.keys.0.key"),
        ({"tenants": tenants(MEMBER), "keys": {"admin": ["sk-secret"]}}, "keys.public or keys.admin"),
        ({"tenants": tenants(file="/nowhere/t.yaml")}, "/nowhere/t.yaml cannot be read"),
    ],
)
def test_what_is_wrong_with_tenants_is_said_without_a_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**keys)
    assert says in str(caught.value) and "sk-secret" not in str(caught.value)
    assert "router.yaml" in str(caught.value) or "tenants" in str(caught.value)
