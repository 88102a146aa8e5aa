"""TLS to replicas and on the public port."""

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Reset,
    Send,
    Wait,
    chunk,
    completion,
    delta,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawClient

CERTIFICATE = Path(__file__).parent.parent / "fakes" / "tls" / "cert.pem"


@pytest.fixture
def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
    return context


def test_requests_and_streams_over_tls(server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for _ in range(3):
            await client.post(CHAT)
            assert (await client.answer()).body == completion()
        assert rig.replica.connections == 1
        assert rig.replica.requests[0].field("host") == f"127.0.0.1:{rig.replica.port}"
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        gate.set()
        assert await client.chunk() == DONE_EVENT
        assert await client.chunk() == b""
        big = b'{"model":"m","prompt":"' + b"x" * 3_000_000 + b'"}'
        await client.post(big)
        assert (await client.answer()).status == 200
        assert rig.replica.requests[-1].body == big

    with_rig(scenario, tls=server_tls)


def test_a_client_that_leaves_ends_the_tls_connection_too(
    server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.replica.answering == 1)
        client.leave()
        await until(lambda: rig.replica.aborted == 1)

    with_rig(scenario, tls=server_tls)


def test_a_certificate_that_is_not_trusted_is_no_replica(server_tls: ssl.SSLContext) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT)
        assert answer.error["code"] == "replica_unreachable"
        assert not rig.replica.requests

    with_rig(scenario, tls=server_tls)


def test_tls_on_the_public_port(server_tls: ssl.SSLContext) -> None:
    async def scenario(rig: Rig) -> None:
        host, _, port = rig.plane.address.rpartition(":")
        trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
        client = RawClient(*await asyncio.open_connection(host, int(port), ssl=trusted))
        rig.clients.append(client)
        for body in (CHAT, CHAT_STREAM, b'{"prompt":"' + b"x" * 1_000_000 + b'"}'):
            await client.post(body)
            answer = await client.answer()
            assert (answer.status, answer.whole) == (200, True)
        assert rig.replica.requests[0].field("x-forwarded-proto") == "https"
        rig.replica.plans.append([Send(STREAM_HEAD + chunk(delta("a"))), Reset()])
        await client.post(CHAT_STREAM)
        answer = await client.answer()
        assert not answer.whole
        assert b'"code":"replica_broken"' in answer.body
        other = RawClient(*await asyncio.open_connection(host, int(port), ssl=trusted))
        await other.send(b"nonsense\r\n\r\n")
        assert (await other.answer()).status == 400
        assert await other.closed()
        leaving = RawClient(*await asyncio.open_connection(host, int(port), ssl=trusted))
        rig.replica.default = [Hang()]
        await leaving.post(CHAT)
        await until(lambda: rig.replica.answering == 1)
        leaving.leave()
        await until(lambda: rig.replica.aborted == 1)

    with_rig(scenario, public_tls=server_tls)
