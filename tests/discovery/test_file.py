"""Replicas from a file that is replaced, rewritten, broken and put right while requests go on."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from router.config_errors import ConfigError
from router.discovery.file_source import FileSource, read_replicas
from router.discovery_config import FileDiscovery
from tests.discovery.changing_fleet import names, run, traffic, until_there_are
from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Send, Wait, chunk, delta
from tests.fakes.proxy_rig import CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig


def replace(path: Path, entries: list[dict[str, Any]]) -> None:
    """As a well-behaved writer does."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries))
    os.replace(new, path)


def source(path: Path) -> dict[str, Any]:
    return {"kind": "file", "path": str(path), "interval_s": 0.02}


def test_a_file_that_is_replaced_and_rewritten_while_requests_go_on(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    path.write_text("[]")

    async def scenario(rig: RouterRig) -> None:
        assert names(rig) == {"r0"}
        async with traffic(rig):
            replace(path, [rig.entry(1), rig.entry(2, weight=2)])
            await until_there_are(rig, "r0", "r1", "r2")
            assert (await rig.fleet())["r2"]["weight"] == 2
            path.write_text(json.dumps([rig.entry(2)]))
            await until_there_are(rig, "r0", "r2")
            replace(path, [])
            await until_there_are(rig, "r0")

    run(scenario, discovery=source(path))


def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("[]")

    async def scenario(rig: RouterRig) -> None:
        async def failed(line: str) -> None:
            await until(lambda: any(line in one for one in caplog.messages))
            assert names(rig) == {"r0", "r1"}
            assert 'warmroute_discovery_up{source="' in (await rig.admin("/metrics")).body.decode()

        replace(path, [rig.entry(1)])
        await until_there_are(rig, "r0", "r1")
        path.write_text(f"- url: {rig.replicas[2].url}\n- urll: x\n")
        await failed("line 2: 1.urll: unknown key, is it url?")
        path.write_text("")
        await failed("expected a list of replicas ([] for none), got NoneType")
        path.unlink()
        await failed("cannot be read: No such file or directory")
        (report,) = (await rig.admin("/fleet")).json()["discovery"]
        assert report["replicas"] == 1 and "cannot be read" in report["failure"]
        replace(path, [rig.entry(2)])
        await until_there_are(rig, "r0", "r2")
        assert sum("1.urll" in one for one in caplog.messages) == 1
        assert sum("works again" in one for one in caplog.messages) == 1

    caplog.set_level(logging.INFO)
    run(scenario, discovery=source(path))


def test_B031_a_replica_that_leaves_the_file_finishes_its_stream(tmp_path: Path) -> None:
    path = tmp_path / "replicas.json"
    path.write_text("[]")

    async def scenario(rig: RouterRig) -> None:
        replace(path, [rig.entry(1)])
        await until_there_are(rig, "r1")
        gate = asyncio.Event()
        rig.replicas[1].default = [
            Send(STREAM_HEAD + chunk(delta("a"))),
            Wait(gate),
            Send(chunk(DONE_EVENT) + LAST_CHUNK),
        ]
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        replace(path, [rig.entry(2)])
        await until(lambda: names(rig) == {"r2"})
        assert (await rig.fleet())["r1"]["leaving"]
        assert await rig.answered_by() == {"r2"}
        gate.set()
        assert await client.chunk() == DONE_EVENT and await client.chunk() == b""
        await until_there_are(rig, "r2")

    run(scenario, known=0, discovery=source(path))


def test_a_file_written_in_place_is_read_when_it_is_still(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("- url: http://a:1\n")
    file = FileSource(FileDiscovery(kind="file", path=str(path)))
    assert [one.url for one in file.look() or ()] == ["http://a:1"]
    assert file.look() is None
    with path.open("a") as half:
        half.write("- url: http://b:1\n")
        half.flush()
        assert file.look() is None
        half.write("- url: http://c:1\n")
    assert file.look() is None
    assert len(file.look() or ()) == 3
    assert file.look() is None


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to would be read forever, and the router could not end."""
    path = tmp_path / "replicas.yaml"
    file = FileSource(FileDiscovery(kind="file", path=str(path)))
    path.symlink_to(os.devnull)
    with pytest.raises(OSError, match="Not a regular file"):
        file.look()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="Not a regular file"):
        file.look()
    path.unlink()
    path.write_text("- url: http://a:1\n")
    assert [one.url for one in file.look() or ()] == ["http://a:1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- url: http://a:1\n- url: http://a:1\n", "x: replica names must differ; twice: a:1"),
        ("a: [", "x: not valid YAML: line 1"),
        ("- {url: 'http://a:1', kv_events: 'tcp://*:5557'}", "belong to `replicas`"),
        ("- url: ftp://a:1", "x: line 1: 0.url: expected http://HOST:PORT"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_replicas(text, "x")
    assert words in str(caught.value)
