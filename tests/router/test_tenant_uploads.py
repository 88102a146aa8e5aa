"""Bodies that are still arriving count as their tenant's, and leave the others room."""

from typing import Any

from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.raw_client import RawAnswer, RawClient
from tests.fakes.tenants import A, B, code, limited, tenants

BODY = b'{"model":"m","prompt":"' + b"x" * 40_000 + b'"}'


async def _begin(client: RawClient, key: dict[str, str], sent: int) -> None:
    """Send a request's head and the first ``sent`` bytes of ``BODY``."""
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: h", b"Authorization: " + key["Authorization"].encode()]
    head = b"\r\n".join([*lines, b"Content-Length: %d" % len(BODY), b"", b""])
    await client.send(head + BODY[:sent])


async def _end(client: RawClient, sent: int) -> RawAnswer:
    await client.send(BODY[sent:])
    return await client.answer()


def _arriving(rig: Rig, tenant: str = "acme") -> tuple[int, int]:
    quota = rig.fleet.tenants.quotas[tenant]
    return quota.arriving, quota.arriving_bytes


def test_a_body_that_arrives_takes_one_of_the_tenants_places() -> None:
    async def scenario(rig: Rig) -> None:
        slow = [await rig.client() for _ in range(2)]
        for client in slow:
            await _begin(client, A, 1_000)
        await until(lambda: _arriving(rig) == (2, 2_000))
        third = await rig.client()
        await _begin(third, A, 0)
        assert code(await third.answer()) == (429, "tenant_concurrent")
        other = await rig.client()
        await _begin(other, B, 10)
        assert (await _end(other, 10)).status == 200
        slow[0].leave()
        await until(lambda: _arriving(rig) == (1, 1_000))
        assert (await _end(slow[1], 1_000)).status == 200
        assert _arriving(rig) == (0, 0)
        counted = rig.counters.tenants["acme"]
        assert counted.turned_away == {"tenant_concurrent": 1} and counted.statuses == {429: 1, 200: 1}

    with_rig(scenario, tenants=limited(concurrent=2))


def test_whatever_ends_a_body_gives_its_place_back() -> None:
    async def scenario(rig: Rig) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer sk-a\r\n"
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
        client = await rig.client()
        await client.send(chunked + b"5\r\nhello\r\nnonsense\r\n")
        assert (await client.answer()).status == 400
        client = await rig.client()
        await client.send(chunked + b"5\r\nhello\r\n")
        await until(lambda: _arriving(rig) == (1, 5))
        assert (await client.answer()).status == 408
        client = await rig.client()
        for sent in (0, 1, len(BODY) - 1):
            await _begin(client, A, sent)
            await until(lambda sent=sent: _arriving(rig) == (1, sent))
            assert (await _end(client, sent)).status == 200
        assert (await rig.ask(CHAT, **A)).status == 200
        assert _arriving(rig) == (0, 0)

    with_rig(scenario, tenants=limited(concurrent=1), timeouts={"client_header_s": 0.1})


def test_one_tenants_bodies_leave_the_others_room() -> None:
    """Alone it may fill four fifths of what all may have arriving; another's body still finds a place."""

    async def scenario(rig: Rig) -> None:
        clients = [await rig.client() for _ in range(3)]
        for client in clients[:2]:
            await _begin(client, A, 39_000)
        await until(lambda: _arriving(rig) == (2, 78_000))
        await _begin(clients[2], A, 5_000)
        assert code(await clients[2].answer()) == (429, "receiving_share")
        other = await rig.client()
        await _begin(other, B, 10_000)
        await until(lambda: _arriving(rig, "bolt") == (1, 10_000))
        for client, sent in ((other, 10_000), (clients[0], 39_000), (clients[1], 39_000)):
            assert (await _end(client, sent)).status == 200

    config: dict[str, Any] = {"receiving_bytes": 100_000}
    with_rig(scenario, tenants=tenants(), limits=config)
