"""A busy fleet is shared between tenants, over real sockets; what a request takes of limits it gives back."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.admission import Admission
from router.proxy.counters import TenantCounters
from router.proxy.tenancy import Caller, Salts
from router.routing.in_flight import Usage
from router.routing.quota import Quota, TenantLimits
from router.routing.tenant import Tenant
from router.tenants_config import TenantsConfig
from tests.fakes.fake_replica import (
    STREAM_HEAD,
    Close,
    Hang,
    Plan,
    Reset,
    SeenRequest,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawClient

WHOLE = stream(delta("a"), delta(None, finish="stop"))
KEYS = {name: {"Authorization": f"Bearer sk-{name}"} for name in ("batch", "flood", "other")}
HELD = {"policy": {"kind": "predicted_finish"}}


def tenants(**flood: Any) -> dict[str, Any]:
    members = [{"name": name, "keys": [f"sk-{name}"]} for name in ("flood", "other")]
    return {"salt_secret": "0123456789abcdef", "members": [members[0] | flood, members[1]]}


def chat(number: int, words: int) -> dict[str, Any]:
    return {**CHAT_STREAM, "messages": [{"role": "user", "content": f"{number} " + "word " * words}]}


class Gates:
    """A replica that answers each request when it is told to, in the order they came."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gates: list[asyncio.Event] = []
        rig.replica.default = self

    def __call__(self, request: SeenRequest) -> Plan:
        self.gates.append(asyncio.Event())
        return [Wait(self.gates[-1]), Send(WHOLE)]

    async def answer_all(self, count: int) -> None:
        """One after the other."""
        for number in range(count):
            await until(lambda number=number: len(self.gates) > number)  # type: ignore[misc]
            self.gates[number].set()


async def posted(rig: Rig, tenant: str, body: dict[str, Any], held: int) -> RawClient:
    """A request that waits, with ``held`` in all."""
    client = await rig.client()
    await client.post(body, **KEYS[tenant])
    await until(lambda: rig.fleet.held == held)
    return client


@pytest.mark.parametrize("kind", ["predicted_finish", "round_robin"])
def test_a_flood_does_not_keep_another_tenant_waiting(kind: str) -> None:
    """20 short prompts wait; a long one of another tenant comes last and is among the first to go."""

    async def scenario(rig: Rig) -> None:
        gates = Gates(rig)
        clients = [await rig.client()]
        await clients[0].post(chat(0, 8_000), **KEYS["flood"])
        await until(lambda: len(gates.gates) == 1)
        for number in range(1, 21):
            clients.append(await posted(rig, "flood", chat(number, 2_000), number))
        clients.append(await posted(rig, "other", chat(21, 4_000), 21))
        await gates.answer_all(22)
        for client in clients:
            answer = await client.answer()
            assert (answer.status, answer.whole) == (200, True)
        order = [b"21 word" in one.body for one in rig.replica.requests]
        assert order.index(True) <= 4, "of 22; shortest first alone would make it the last"

    with_rig(scenario, tenants=tenants(), policy={"kind": kind})


def test_a_weight_is_a_part_of_the_fleet() -> None:
    async def scenario(rig: Rig) -> None:
        gates = Gates(rig)
        clients = [await rig.client()]
        await clients[0].post(chat(0, 8_000), **KEYS["flood"])
        await until(lambda: len(gates.gates) == 1)
        for number in range(24):
            tenant = ("flood", "other")[number % 2]
            clients.append(await posted(rig, tenant, chat(number, 2_000), number + 1))
        await gates.answer_all(25)
        for client in clients:
            assert (await client.answer()).status == 200
        flood = rig.plane.service.settings.tenancy
        assert flood is not None
        salt = flood.named("flood").salt(None).encode()  # type: ignore[union-attr]
        first = [salt in one.body for one in rig.replica.requests[1:13]]
        assert 8 <= sum(first) <= 10, "three quarters of twelve, by one either way"

    with_rig(scenario, tenants=tenants(weight=3), **HELD)


def test_a_keys_priority_orders_its_tenants_requests() -> None:
    """A short prompt of the batch key came first; the long one of the usual key goes before it."""

    async def scenario(rig: Rig) -> None:
        gates = Gates(rig)
        clients = [await rig.client()]
        await clients[0].post(chat(0, 8_000), **KEYS["flood"])
        await until(lambda: len(gates.gates) == 1)
        for number, (tenant, words) in enumerate((("batch", 2_000), ("flood", 6_000)), 1):
            clients.append(await posted(rig, tenant, chat(number, words), number))
        await gates.answer_all(3)
        for client in clients:
            assert (await client.answer()).status == 200
        assert [b"2 word" in one.body for one in rig.replica.requests] == [False, True, False]

    keys = ["sk-flood", {"key": "sk-batch", "priority": 5}]
    with_rig(scenario, tenants=tenants(keys=keys), **HELD)


def test_a_tenant_that_fills_the_queue_leaves_places_for_others() -> None:
    async def scenario(rig: Rig) -> None:
        gates = Gates(rig)
        clients = [await rig.client()]
        await clients[0].post(chat(0, 8_000), **KEYS["flood"])
        await until(lambda: len(gates.gates) == 1)
        for number in range(1, 9):  # held < 4 × (10 - held)
            clients.append(await posted(rig, "flood", chat(number, 2_000), number))
        refused = await rig.ask(chat(9, 2_000), **KEYS["flood"])
        assert (refused.status, refused.error["code"], refused.field("retry-after")) == (
            429,
            "hold_share",
            "5",
        )
        for number in (9, 10):
            clients.append(await posted(rig, "other", chat(number, 2_000), number))
        full = await rig.ask(chat(11, 2_000), **KEYS["other"])
        assert (full.status, full.error["code"]) == (429, "hold_full")
        clients.pop(3).leave()  # who leaves the queue makes room in it
        await until(lambda: rig.fleet.held == 9)
        assert rig.fleet.tenants.quotas["flood"].held == 7
        await gates.answer_all(10)
        for client in clients:
            assert (await client.answer()).status == 200

    with_rig(scenario, tenants=tenants(), hold={"max_requests": 10}, **HELD)


# --- given back once ------------------------------------------------------------------------------

STEPS = st.lists(st.sampled_from(["began", "held", "not held", "used", "used more"]), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(STEPS, st.sampled_from([200, 429, 499, 503]), st.booleans()), min_size=1, max_size=5
    )
)
def test_whatever_a_request_went_through_nothing_of_it_stays(
    requests: list[tuple[list[str], int, bool]],
) -> None:
    quota = Quota(TenantLimits(concurrent=9, tokens_per_s=1_000.0))
    salts = Salts(TenantsConfig.model_validate(tenants()))
    caller = Caller(Tenant("a"), quota, TenantCounters(), salts)
    for number, (steps, status, answered) in enumerate(requests):
        admission, tokens, began = Admission(caller), quota.tokens, False
        for step in steps:
            if step == "began" and not began:
                began = True
                admission.began(100, 50, float(number))
            elif step in ("held", "not held"):
                admission.held(step == "held")
            elif step.startswith("used"):
                admission.used(Usage(90, 500 if step == "used more" else 5, None), float(number))
        used = quota.tokens - tokens
        admission.ended(status, float(number), answered=answered)
        kept = used if answered or status == 499 else 0
        assert quota.tokens - tokens == kept
        assert (quota.in_flight, quota.held) == (0, 0)


PLANS: dict[str, Plan] = {
    "whole": [Send(sized(completion()))],
    "stream": [Send(stream(delta("a"), delta(None, finish="stop"), usage_event(9, 1, 0)))],
    "refused": [Send(sized(b"{}", 400, "Bad Request"))],
    "failing": [Send(sized(b"{}", 500, "Error"))],
    "reset": [Reset()],
    "garbage": [Send(b"what\r\n\r\n"), Close()],
    "broken": [Send(STREAM_HEAD + chunk(delta("a"))), Reset()],
    "hangs": [Hang()],
}
REQUEST = st.tuples(
    st.sampled_from(["flood", "other"]),
    st.sampled_from(sorted(PLANS)),
    st.sampled_from(["waits", "leaves", "bad"]),
)


@settings(max_examples=12, deadline=None)
@given(wishes=st.lists(REQUEST, min_size=1, max_size=12))
def test_on_every_path_limits_are_kept_and_given_back(wishes: list[tuple[str, str, str]]) -> None:
    """``with_rig`` looks whether anything is left."""

    async def scenario(rig: Rig) -> None:
        quotas = rig.fleet.tenants.quotas
        clients = []
        for number, (tenant, plan, end) in enumerate(wishes):
            for replica in rig.replicas:
                replica.default = PLANS[plan]
            client = await rig.client()
            body = b"{" if end == "bad" else {**chat(number, 800), "stream": plan != "whole"}
            await client.post(body, **KEYS[tenant])
            clients.append((client, plan, end))
            assert quotas["flood"].in_flight <= 2
            if number % 3 == 2:
                await asyncio.sleep(0)
        for client, plan, end in clients:
            if end == "leaves" or plan == "hangs":
                client.leave()
        for client, plan, end in clients:
            if end != "leaves" and plan != "hangs":
                await client.answer()

    limits = {"concurrent": 2, "requests_per_s": 1_000, "tokens_per_s": 1e6}
    with_rig(
        scenario,
        replicas=2,
        tenants=tenants(limits=limits),
        timeouts={"first_byte_s": 2.0},
        **HELD,
    )


def test_a_request_without_a_body_is_its_tenants_too() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(b"", "/v1/files/x", method="GET", **KEYS["other"])
        assert answer.status == 200 and rig.counters.tenants["other"].statuses == {200: 1}
        assert (await rig.ask(CHAT, **KEYS["other"])).status == 200

    with_rig(scenario, tenants=tenants())
