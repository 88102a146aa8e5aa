"""TLS by the config: the public port's certificate and its replacement, whom to trust as a replica."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.assembly import Router
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
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.router_rig import RouterRig, with_router
from warmroute import main

FILES = Path(__file__).parent.parent / "fakes" / "tls"
EC = {"cert": str(FILES / "cert.pem"), "key": str(FILES / "key.pem")}
RSA = {"cert": str(FILES / "rsa_cert.pem"), "key": str(FILES / "rsa_key.pem")}


async def connect(rig: RouterRig) -> RawClient:
    """Over TLS, trusting both certificates."""
    trusted = ssl.create_default_context(cafile=EC["cert"])
    trusted.load_verify_locations(RSA["cert"])
    host, _, port = rig.router.data_plane.address.rpartition(":")
    client = RawClient(*await asyncio.open_connection(host, int(port), ssl=trusted))
    rig.clients.append(client)
    return client


def certificate_of(client: RawClient) -> str:
    """The file with the certificate that the router showed."""
    shown = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    (file,) = (
        files["cert"]
        for files in (EC, RSA)
        if ssl.PEM_cert_to_DER_cert(Path(files["cert"]).read_text()) == shown
    )
    return file


def test_the_public_port_speaks_tls_and_takes_another_certificate() -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        stream = await connect(rig)
        await stream.post(CHAT_STREAM)
        await stream.head()
        assert await stream.chunk() == delta("a") and certificate_of(stream) == EC["cert"]
        for files in (RSA, EC, RSA):
            await rig.reload(rig.entry(0), tls=files)
            client = await connect(rig)
            await client.post(CHAT)
            assert (await client.answer()).status == 200
            assert certificate_of(client) == files["cert"]
        gate.set()
        assert await stream.chunk() == DONE_EVENT and await stream.chunk() == b""
        await stream.post(CHAT)
        assert (await stream.answer()).status == 200
        assert rig.replica.requests[-1].field("x-forwarded-proto") == "https"

    with_router(scenario, tls=EC)


def test_files_that_fit_no_more_leave_the_old_certificate(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def write(certificate: str, private_key: str) -> None:
        cert.write_bytes(Path(certificate).read_bytes())
        key.write_bytes(Path(private_key).read_bytes())

    async def scenario(rig: RouterRig) -> None:
        write(RSA["cert"], EC["key"])  # half of the renewal is written
        answer = await rig.try_reload(rig.entry(0))
        assert answer.status == 400 and str(cert) in answer.json()["error"]["message"]
        assert certificate_of(await connect(rig)) == EC["cert"]
        write(RSA["cert"], RSA["key"])
        await rig.reload(rig.entry(0))
        assert certificate_of(await connect(rig)) == RSA["cert"]

    write(EC["cert"], EC["key"])
    with_router(scenario, tls={"cert": str(cert), "key": str(key)})


def test_who_does_not_speak_tls_is_closed_in_time() -> None:
    async def scenario(rig: RouterRig) -> None:
        plain = await rig.client()
        await plain.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        rest, _ = await plain.rest()
        assert b"HTTP" not in rest
        silent = await rig.client()
        assert await silent.closed()
        assert certificate_of(await connect(rig)) == EC["cert"]

    with_router(scenario, tls=EC, timeouts={"client_header_s": 0.3})


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"cert": "/nowhere/cert.pem"}, "tls.cert: /nowhere/cert.pem cannot be read"),
        ({"cert": EC["cert"], "key": "/nowhere/key.pem"}, "tls.key: /nowhere/key.pem cannot be read"),
        ({"cert": EC["cert"]}, "no certificate with its key"),
        ({"cert": EC["cert"], "key": RSA["key"]}, "no certificate with its key"),
        ({"cert": RSA["cert"], "key": str(FILES / "locked_key.pem")}, "have no password"),
        ({"cert": __file__}, "in PEM form"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tls: dict[str, str], says: str
) -> None:
    keys = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "replicas": [{"url": "http://127.0.0.1:1"}]}
    with pytest.raises(ConfigError) as caught:
        Router(parse_config(keys | {"tls": tls}, "test"))
    assert says in str(caught.value)
    path = tmp_path / "router.yaml"
    path.write_text(str(keys | {"tls": tls}))
    for command in (["serve", str(path)], ["serve", str(path), "--check"]):
        assert main(command) == 2
        shown = capsys.readouterr()
        assert says in shown.err and not shown.out


# --- replicas -------------------------------------------------------------------------------------


def with_tls_replica(scenario: Callable[[RouterRig, FakeReplica], Awaitable[None]], **tls: Any) -> None:
    """A router that has a plain replica, and then only one that speaks TLS."""

    async def changed(rig: RouterRig) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(EC["cert"], EC["key"])
        replica = FakeReplica(tls=context)
        await replica.start()
        try:
            await rig.reload({"url": replica.url, "name": "tls", **tls})
            await scenario(rig, replica)
        finally:
            await replica.stop()

    with_router(changed)


@pytest.mark.parametrize("tls", [{"ca": EC["cert"]}, {"insecure": True}])
def test_a_replica_is_trusted_by_its_authority_or_blindly(tls: dict[str, object]) -> None:
    async def scenario(rig: RouterRig, replica: FakeReplica) -> None:
        await rig.until_health("tls", "healthy")
        assert (await rig.ask()).status == 200
        assert replica.requests and replica.probes

    with_tls_replica(scenario, tls=tls)


@pytest.mark.parametrize("tls", [{}, {"tls": {"ca": RSA["cert"]}}])
def test_a_replica_that_is_not_trusted_gets_nothing(tls: dict[str, object]) -> None:
    async def scenario(rig: RouterRig, replica: FakeReplica) -> None:
        await rig.until_health("tls", "ejected")
        assert (await rig.ask()).error["code"] == "replica_unreachable"
        assert not replica.requests and not replica.probes
        await rig.reload({"url": replica.url, "name": "tls", "tls": {"ca": EC["cert"]}})  # mended
        await rig.until_health("tls", "probation", "healthy")
        assert (await rig.ask()).status == 200

    with_tls_replica(scenario, **tls)


@pytest.mark.parametrize(
    ("replica", "says"),
    [
        ({"url": "http://h:1", "tls": {"insecure": True}}, "tls belongs to https replicas"),
        ({"url": "https://h:1", "tls": {"insecure": True, "ca": EC["cert"]}}, "keep one of them"),
        ({"url": "https://h:1", "tls": {"ca": "/nowhere/ca.pem"}}, "/nowhere/ca.pem cannot be read"),
        ({"url": "https://h:1", "tls": {"ca": __file__}}, "holds no certificate"),
    ],
)
def test_what_is_wrong_with_a_replicas_tls_is_said(replica: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Router(parse_config({"replicas": [replica]}, "router.yaml"))
    assert says in str(caught.value)
