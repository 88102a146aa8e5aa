"""Several sources together: clashes, a start without replicas, and reloads of ``discovery``."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.config import parse_config
from router.config_errors import ConfigError
from router.discovery import discovery as discovery_module
from router.discovery.discovery import Discovery
from router.discovery.source import Found, SourceStatus
from router.discovery_config import DnsDiscovery
from router.proxy.assembly import Router
from tests.discovery.changing_fleet import names, run, until_there_are
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.proxy_rig import until
from tests.fakes.router_process import ROOT
from tests.fakes.router_rig import RouterRig


def listed(folder: Path, name: str, *entries: dict[str, Any]) -> dict[str, Any]:
    """A source whose file has these replicas."""
    path = folder / name
    path.write_text(json.dumps(entries))
    return {"kind": "file", "path": str(path), "interval_s": 0.02}


def test_a_start_without_any_replica_says_so_and_gets_ready(tmp_path: Path) -> None:
    source = listed(tmp_path, "a")

    async def scenario(rig: RouterRig) -> None:
        answer = await rig.get("/readiness")
        assert answer.status == 503
        assert answer.json()["reason"] == "no replicas: none configured, found or added yet"
        assert (await rig.ask()).status == 503
        listed(tmp_path, "a", rig.entry(1))
        await until_there_are(rig, "r1")
        assert (await rig.get("/readiness")).status == 200
        assert (await rig.ask()).status == 200

    run(scenario, known=0, discovery=source)


def test_what_is_found_before_the_start_gets_the_first_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        fake = FakeReplica()
        await fake.start()
        source = listed(tmp_path, "a", {"url": fake.url, "name": "a"})
        config = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "discovery": source}
        router = Router(parse_config(config, "x"))
        await router.start()
        assert [(one.name, one.probed, one.usable) for one in router.fleet.replicas] == [("a", True, True)]
        await router.stop()
        await fake.stop()

    asyncio.run(scenario())


def test_a_clash_is_an_error_at_the_start(tmp_path: Path) -> None:
    config = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "replicas": [{"url": "http://127.0.0.1:9", "name": "r0"}],
        "discovery": listed(tmp_path, "a", {"url": "http://127.0.0.1:10", "name": "r0"}),
    }
    path = tmp_path / "router.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "warmroute.py"), "serve", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    assert f"file {tmp_path}/a: r0 (http://127.0.0.1:10): replicas has that name" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_later_clash_is_refused_and_the_rest_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = listed(tmp_path, "a"), listed(tmp_path, "b")

    async def scenario(rig: RouterRig) -> None:
        listed(tmp_path, "b", rig.entry(1))
        await until_there_are(rig, "r0", "r1")
        listed(tmp_path, "a", rig.entry(2) | {"name": "r0"}, rig.entry(1) | {"name": "x"}, rig.entry(2))
        await until_there_are(rig, "r0", "x", "r2")
        (name,) = [line for line in caplog.messages if "replicas has that name" in line]
        assert name.startswith(f"file {tmp_path}/a: r0 (") and name.endswith(". Not used")
        assert sum("has that URL as x" in line for line in caplog.messages) == 1
        assert (await rig.fleet())["r0"]["url"] == rig.replicas[0].url
        listed(tmp_path, "a")
        await until_there_are(rig, "r0", "r1")

    run(scenario, discovery=[first, second])


def test_a_reload_changes_sources_and_keeps_what_was_found(tmp_path: Path) -> None:
    first, second = listed(tmp_path, "a"), listed(tmp_path, "b")

    async def scenario(rig: RouterRig) -> None:
        static = rig.entry(0)
        listed(tmp_path, "a", rig.entry(1))
        await until_there_are(rig, "r0", "r1")
        (replica,) = [one for one in rig.router.fleet.replicas if one.name == "r1"]
        await rig.reload(static, discovery=[{**first, "interval_s": 0.03}])
        assert names(rig) == {"r0", "r1"}
        await rig.reload(static, discovery=[first, second], log={"level": "info"})
        listed(tmp_path, "b", rig.entry(2))
        await until_there_are(rig, "r0", "r1", "r2")
        assert replica in rig.router.fleet.replicas
        outside = {"kind": "kubernetes", "service": "a"}
        answer = await rig.try_reload(static, discovery=[outside])
        assert answer.status == 400 and b"set namespace" in answer.body
        assert names(rig) == {"r0", "r1", "r2"}
        await rig.reload(static, discovery=[second])
        await until_there_are(rig, "r0", "r2")
        listed(tmp_path, "b")
        await until_there_are(rig, "r0")
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith("discovery") and name.endswith("/a") for name in tasks)

    run(scenario, discovery=[first])


def test_a_source_that_does_not_answer_does_not_keep_the_router_from_starting(tmp_path: Path) -> None:
    source = {"kind": "file", "path": str(tmp_path / "later"), "interval_s": 0.02}

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.ask()).status == 200
        listed(tmp_path, "later", rig.entry(1))
        await until_there_are(rig, "r0", "r1")

    run(scenario, discovery=[source])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"kind": "consul"}, "expected a mapping with kind: file, dns or kubernetes"),
        ({"path": "x"}, "expected a mapping with kind: file, dns or kubernetes"),
        ({"kind": "file"}, "path: Field required"),
        ({"kind": "file", "path": "x", "host": "h"}, "unknown key"),
        ({"kind": "dns", "host": "h"}, "expected host and port, or srv"),
        ({"kind": "dns", "srv": "s", "port": 1}, "expected host and port, or srv"),
        ({"kind": "dns", "host": "h", "port": 1, "nameserver": "a:53"}, "nameserver belongs to srv"),
        ({"kind": "dns", "host": "h", "port": 70_000}, "less than or equal to 65535"),
        ({"kind": "dns", "host": "h", "port": 1, "replica": {"tls": {}}}, "tls belongs to https"),
        ({"kind": "dns", "host": "h", "port": 1, "replica": {"url": "http://h:1"}}, "unknown key"),
        ({"kind": "kubernetes"}, "expected service (a name) or pods"),
        ({"kind": "kubernetes", "pods": "a=b", "api": "10.0.0.1"}, "expected https://HOST:PORT"),
    ],
)
def test_what_is_wrong_with_a_source_is_said(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"discovery": [source]}, "x", yaml.safe_dump({"discovery": [source]}))
    assert words in str(caught.value)


def test_one_source_needs_no_list_and_two_must_differ() -> None:
    file = {"kind": "file", "path": "a"}
    assert len(parse_config({"discovery": file}, "x").discovery) == 1
    with pytest.raises(ConfigError, match="file a: given twice"):
        parse_config({"discovery": [file, file]}, "x")
    with pytest.raises(ConfigError, match="expected at least 1 entry"):
        parse_config({"discovery": []}, "x")


def test_a_source_that_is_at_fault_says_so_once_and_holds_no_start(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty:
        turns = 0

        async def watch(self, found: Found, status: SourceStatus) -> None:
            self.turns += 1
            raise ZeroDivisionError

    async def scenario() -> None:
        discovery, source = Discovery(lambda: None), Faulty()
        config = DnsDiscovery(kind="dns", host="h", port=80)
        (running,) = discovery.prepared([config])
        running.source = source
        discovery.use([running])
        await asyncio.wait_for(running.status.heard.wait(), 5.0)
        await until(lambda: source.turns > 3)
        assert discovery.report()[0].failure == "fault, see the log: ZeroDivisionError"
        await discovery.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery_module, "_AFTER_FAULT_S", 0.001)
        asyncio.run(scenario())
    assert [line for line in caplog.messages if "fault" in line] == [
        "dns h:80: fault; what was found before stays"
    ]
