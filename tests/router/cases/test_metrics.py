"""Bug cases of the category metrics that no test beside the proxy's own proves."""

import asyncio
import json
import random
import re
import string
import time
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Send,
    Wait,
    chunk,
    delta,
    event,
    sized,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import RouterRig, with_router
from tests.fakes.tenants import tenants


def _series(page: bytes) -> set[str]:
    return {line.rpartition(" ")[0] for line in page.decode().splitlines() if not line.startswith("#")}


@pytest.mark.parametrize("keys", [{}, {"tenants": tenants()}], ids=["no tenants", "tenants"])
def test_B027_what_clients_make_up_makes_no_series(keys: dict[str, Any]) -> None:
    """Random models, paths, methods, headers and keys: the same series as before, none with their text.

    1,000 requests each way for the case's 20,000: a series is made by the first request that asks for it.
    """
    rng = random.Random(5)

    def made_up() -> str:
        return "canary" + "".join(rng.choices(string.ascii_letters, k=8))

    async def some(rig: RouterRig, count: int) -> None:
        for number in range(count):
            names = ("X_Tenant", "X_Tenant_Id", "User_Agent", "X_Session_Id", "X_Request_Id")
            fields: dict[str, Any] = {name: made_up() for name in names}
            if keys:
                fields["Authorization"] = f"Bearer {('sk-a', 'sk-b', made_up())[number % 3]}"
            await rig.ask({**CHAT, "model": made_up()}, **fields)
            await rig.ask(CHAT, f"/v1/{made_up()}", **fields)
            await rig.ask(b"", f"/{made_up()}", method="GET", **fields)
            await rig.ask({**CHAT, "user": made_up()}, **fields)

    async def scenario(rig: RouterRig) -> None:
        await some(rig, 40)  # until what replicas are learned to cost has its series, too
        before = (await rig.admin("/metrics")).body
        await some(rig, 210)
        began = time.perf_counter()
        after = (await rig.admin("/metrics")).body
        assert time.perf_counter() - began < 1.0
        assert _series(after) == _series(before)
        assert b"canary" not in after
        assert b'status="404"' in after  # they were counted, under what the router knows
        labels = set(re.findall(rb'tenant="([^"]*)"', after))
        assert labels == ({b"acme", b"bolt", b"public"} if keys else set())

    with_router(scenario, replicas=2, **keys)


def test_B113_first_byte_and_first_token_are_two_metrics() -> None:
    """Role, comments and an empty delta come first; reasoning is a token; the clock is the router's own."""
    now = 100.0

    async def scenario(rig: Rig) -> None:
        nonlocal now
        rig.plane.service.clock = lambda: now
        comment, content = asyncio.Event(), asyncio.Event()
        reasoning = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
        rig.replica.plans.append(
            [
                Send(STREAM_HEAD + chunk(delta("", role="assistant"))),
                Wait(comment),
                Send(chunk(b": alive\n\n") + chunk(delta(""))),
                Wait(content),
                Send(chunk(reasoning) + chunk(delta("x", finish="stop")) + chunk(DONE_EVENT) + LAST_CHUNK),
            ]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await until(lambda: rig.replica.answering == 1)
        await client.head()
        await client.chunk()
        assert (rig.counters.first_byte_s.total, sum(rig.counters.ttft_s.counts)) == (0.0, 0)
        now += 0.5
        comment.set()
        assert await client.chunk() == b": alive\n\n"
        await client.chunk()
        now += 1.5
        content.set()
        while await client.chunk():
            pass
        assert rig.counters.ttft_s.total == 2.0
        assert sum(rig.counters.ttft_s.counts) == 1
        assert rig.counters.first_byte_s.total == 0.0

    with_rig(scenario, timeouts={"idle_s": 60.0})


def test_B113_a_json_answer_has_a_first_byte_and_no_first_token() -> None:
    async def scenario(rig: Rig) -> None:
        assert json.loads((await rig.ask(CHAT)).body)["object"] == "chat.completion"
        assert sum(rig.counters.first_byte_s.counts) == 1
        assert sum(rig.counters.ttft_s.counts) == 0

    with_rig(scenario)


def test_B113_a_stream_without_a_token_is_counted_by_itself() -> None:
    async def scenario(rig: RouterRig) -> None:
        empty = stream(delta("", role="assistant"), delta(None, finish="stop"))
        rig.replicas[0].plans += [[Send(empty)], [Send(sized(b"{}", 400, "Bad Request"))]]
        for status in (200, 400, 200):
            assert (await rig.ask(CHAT_STREAM)).status == status
        assert (await rig.ask(CHAT)).status == 200
        page = (await rig.admin("/metrics")).body.decode()
        assert "warmroute_tokenless_streams_total 1.0" in page and "warmroute_ttft_seconds_count 1.0" in page

    with_router(scenario)
