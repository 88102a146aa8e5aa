"""Bug cases of the category config."""

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from router.config import load_config
from router.config_errors import ConfigError
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeReplica,
    Send,
    Wait,
    chunk,
    delta,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.raw_client import RawClient
from tests.fakes.router_process import RouterProcess, router_process
from tests.fakes.router_rig import QUICK_HEALTH, RouterRig, with_router

ROOT = Path(__file__).resolve().parents[3]
CERTIFICATE = ROOT / "tests" / "fakes" / "tls" / "cert.pem"


async def _reload(router: RouterProcess) -> tuple[int, str]:
    client = await RawClient.connect(router.admin)
    await client.post(b"", "/reload")
    answer = await client.answer()
    client.leave()
    return answer.status, answer.body.decode()


async def _page(router: RouterProcess, path: str) -> str:
    client = await RawClient.connect(router.admin)
    await client.post(b"", path, method="GET")
    answer = await client.answer()
    client.leave()
    return answer.body.decode()


def test_B008_no_broken_save_sticks_and_the_next_good_one_is_applied(tmp_path: Path) -> None:
    """Half-written, empty, missing, a bad replica, in place or renamed: while a stream runs throughout."""
    file = tmp_path / "router.yaml"

    async def follow_edits(router: RouterProcess) -> None:
        good = file.read_text()
        config = yaml.safe_load(good)
        bad_replica = yaml.safe_dump(config | {"replicas": [*config["replicas"], {"url": "ftp://h"}]})
        deep = "replicas: " + "[" * 5_000
        broken = [good[: len(good) // 2] + "  [", "", bad_replica, "- a\n", "\0", deep]
        for number, text in enumerate(broken, 1):
            file.write_text(text)
            status, error = await _reload(router)
            assert status == 400 and str(file) in error
            assert '"kind":"predicted_finish"' in await _page(router, "/config")
            assert f"warmroute_config_reload_failures_total {number}.0" in await _page(router, "/metrics")
            assert (await router.ask(CHAT)).status == 200
            file.write_text(yaml.safe_dump(config | {"policy": {"kind": "round_robin"}}))
            assert (await _reload(router))[0] == 200
            assert '"kind":"round_robin"' in await _page(router, "/config")
            other = tmp_path / "new.yaml"
            other.write_text(good)
            other.rename(file)
            assert (await _reload(router))[0] == 200
        file.unlink()
        status, error = await _reload(router)
        assert status == 400 and "cannot be read" in error
        os.mkfifo(file)  # nobody writes into it: opening it would hold the router for ever
        status, error = await _reload(router)
        assert status == 400 and "cannot be read again" in error
        assert (await router.ask(CHAT)).status == 200
        file.unlink()
        file.write_text(good)
        assert (await _reload(router))[0] == 200

    async def main() -> None:
        gate = asyncio.Event()
        replica = FakeReplica()
        await replica.start()
        replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        async with router_process(tmp_path, [replica]) as router:
            stream = await RawClient.connect(router.address)
            await stream.post(CHAT_STREAM)
            await stream.head()
            await follow_edits(router)
            gate.set()
            assert [await stream.chunk() for _ in range(3)] == [delta("a"), DONE_EVENT, b""]
        await replica.stop()

    asyncio.run(main())


WRONG: dict[str, tuple[str, str]] = {
    "misspelt": ("timouts:\n  idle_s: 3", "line 1: timouts|timeouts?"),
    "misspelt inside": ("hold:\n  max_request: 3", "line 2: hold.max_request|max_requests?"),
    "a number with its unit": ("timeouts:\n  idle_s: 30s", "line 2: timeouts.idle_s"),
    "another unit": ("timeouts:\n  idle_ms: 30", "line 2: timeouts.idle_ms|idle_s?"),
    "negative": ("hold:\n  max_wait_s: -1", "line 2: hold.max_wait_s"),
    "zero": ("seed: 1\nlimits: {body_bytes: 0}", "line 2: limits.body_bytes"),
    "given twice": ("listen: a:1\nadmin: b:1\nlisten: b:2", "line 3|listen|line 1"),
    "yes for a number": ("retries:\n  attempts: yes", "line 2: retries.attempts"),
    "on for seconds": ("timeouts: {idle_s: on}", "line 1: timeouts.idle_s"),
    "a number for yes": ("expose_routing: 3", "line 1: expose_routing"),
    "an unset variable": ("api_key: ${NOT_SET_ANYWHERE}", "line 1: api_key|NOT_SET_ANYWHERE"),
    "a variable that nobody reads": ("health: {path: '/${PATH_OF_IT}'}", "line 1: health.path|environment"),
    "a list where none belongs": ("policy: [random]", "line 1: policy"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_B045_what_is_wrong_is_named_with_its_line(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    file = tmp_path / "router.yaml"
    file.write_text(f"{text}\nreplicas: [{{url: 'http://h:1'}}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert all(part in str(caught.value) for part in says.split("|")), caught.value


def test_B045_check_fails_with_2_or_shows_every_value_with_secrets_masked(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"

    def check(text: str) -> "subprocess.CompletedProcess[str]":
        file.write_text(text)
        command = [sys.executable, "-m", "warmroute", "serve", "--check", str(file)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)

    wrong = check("replicas: [{url: 'http://h:1'}]\nhold: {max_inflght: 5}\n")
    assert wrong.returncode == 2
    assert f"{file}: line 2: hold.max_inflght" in wrong.stderr and "Traceback" not in wrong.stderr
    right = check("api_key: sk-canary\nreplicas: [{url: 'http://h:1'}]\nhold: {max_requests: 5}\n")
    assert right.returncode == 0
    shown = yaml.safe_load(right.stdout)
    assert shown["hold"] == {
        "enabled": True,
        "max_wait_s": 120.0,
        "max_requests": 5,
        "guard_caches": False,
    }
    assert shown["api_key"] == "**********" and "sk-canary" not in right.stdout


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h:8000/base", "without a path"),
        ("http://h:8000/v1", "without a path"),
        ("http://h:8000?x=1", "without a path"),
        ("h:8000", "http://HOST:PORT"),
    ],
)
def test_B083_a_url_that_probes_and_traffic_could_read_differently_is_refused(
    url: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"replicas:\n  - url: {url}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(file)


def test_B083_probes_and_requests_have_the_same_host_and_root() -> None:
    """With a trailing slash, and over TLS with a certificate of the operator's own."""

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.ask(CHAT)).status == 200
        await until(lambda: len(rig.replica.probes) >= 3)
        seen = [*rig.replica.probes, *rig.replica.requests]
        assert {request.field("host") for request in seen} == {f"127.0.0.1:{rig.replica.port}"}
        await rig.reload({"url": rig.replica.url + "/", "name": "r0"})
        assert (await rig.ask(CHAT)).status == 200

    with_router(scenario)


def test_B083_tls_with_an_own_authority_works_for_probes_and_requests_alike() -> None:
    async def scenario(rig: RouterRig) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
        secret = FakeReplica(tls=context)
        await secret.start()
        await rig.reload({"url": secret.url, "name": "tls", "tls": {"ca": str(CERTIFICATE)}})
        await rig.until_health("tls", "healthy")
        await until(lambda: [one.name for one in rig.router.fleet.replicas] == ["tls"])
        assert (await rig.ask(CHAT)).status == 200
        await rig.reload({"url": secret.url, "name": "strict"})
        await rig.until_health("strict", "ejected")
        await secret.stop()

    with_router(scenario)


def test_B083_a_wrong_port_is_said_at_the_start_with_the_url_tried(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    wrong = {"url": f"http://127.0.0.1:{port}", "name": "wrong"}

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.fleet())["wrong"]["health"] == "ejected"  # known before the first request
        assert f"replica wrong is ejected: GET http://127.0.0.1:{port}/health: no connection" in caplog.text

    with caplog.at_level(logging.INFO):
        with_router(scenario, others=[wrong])


def test_B129_one_of_three_up_is_enough_and_the_others_join() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await rig.get("/readiness")).status == 200
        assert await rig.answered_by(6) == {"r0"}
        for number in (1, 2):
            await rig.replicas[number].start()
            await rig.until_health(f"r{number}", "probation")
        await until(lambda: all(len(replica.probes) > 3 for replica in rig.replicas))
        for _ in range(10):
            await rig.ask(CHAT)
        assert await rig.answered_by(9) == {"r0", "r1", "r2"}

    with_router(
        scenario, replicas=3, down=2, expose_routing=True, health={**QUICK_HEALTH, "max_backoff_s": 0.2}
    )


def test_B129_with_nobody_up_it_starts_not_ready_and_becomes_ready() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await rig.get("/health")).status == 200
        assert (await rig.get("/readiness")).status == 503
        answer = await rig.ask(CHAT)  # an answer at once, not a wait
        assert (answer.status, answer.error["code"]) == (502, "replica_unreachable")
        await rig.replicas[1].start()
        await rig.until_health("r1", "probation", "healthy")
        assert (await rig.get("/readiness")).status == 200
        assert (await rig.ask(CHAT)).status == 200

    with_router(scenario, replicas=2, down=2, health={**QUICK_HEALTH, "max_backoff_s": 0.2})
