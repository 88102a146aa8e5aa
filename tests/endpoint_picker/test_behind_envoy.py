"""A real Envoy with our endpoint picker: chat, streams, failures, limits, clients that leave."""

import asyncio
import json
from itertools import takewhile
from typing import Any

import pytest

from tests.endpoint_picker.envoy_modes import HOLD, MODES, Change
from tests.fakes.envoy import Config, PickerRig, needs_envoy, with_envoy
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Plan,
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
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until

pytestmark = needs_envoy

BIG = {**CHAT, "messages": [{"role": "user", "content": "tell me all about it. " * 150_000}]}
"""Over 3 MiB."""
SLOW_HEALTH = {"interval_s": 60.0, "timeout_s": 0.3, "failures_to_eject": 3}
"""Probed at the start alone."""


@MODES
def test_answers_pass_unchanged_and_are_learned_from(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        plain, streamed = await rig.ask(), await rig.ask(CHAT_STREAM)
        assert (plain.status, plain.body) == (200, completion())
        assert streamed.body.endswith(DONE_EVENT) and streamed.body.count(b"data: ") == 6
        assert [json.loads(r.requests[0].body) for r in rig.replicas] == [CHAT, CHAT_STREAM]
        counters = rig.counters
        await until(lambda: not counters.in_flight)
        assert counters.requests == {("r0", 200): 1, ("r1", 200): 1}
        assert (counters.prompt_tokens, counters.cached_tokens, counters.output_tokens) == (20, 4, 3)
        assert sum(counters.ttft_s.counts) == 1 and sum(counters.first_byte_s.counts) == 2
        page = (await rig.rig.admin("/metrics")).body.decode()
        assert 'warmroute_requests_total{replica="r1",status="200"} 1.0' in page

    with_envoy(scenario, change=change)


@MODES
def test_events_pass_as_they_come(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        gate = asyncio.Event()
        first, rest = (
            chunk(delta("hel")),
            b"".join(map(chunk, (delta("lo"), usage_event(9, 2, 0), DONE_EVENT))),
        )
        rig.replicas[0].plans.append([Send(STREAM_HEAD + first), Wait(gate), Send(rest + LAST_CHUNK)])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("hel")
        (ledger, *_) = (replica.ledger for replica in rig.rig.router.fleet.replicas)
        await until(lambda: ledger.decoding == 1)
        gate.set()
        while (piece := await client.chunk()) != b"":
            assert piece
        await until(lambda: not ledger.decoding)
        assert rig.counters.output_tokens == 2

    with_envoy(scenario, change=change, replicas=1)


@MODES
def test_a_body_of_megabytes(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        answer = await rig.ask(BIG)
        assert answer.status == 200 and json.loads(rig.replicas[0].requests[0].body) == BIG

    with_envoy(scenario, change=change, replicas=1)


@MODES
def test_a_body_beyond_the_limit_is_refused(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        answer = await rig.ask({**CHAT, "user": "x" * 30_000})
        assert answer.status == 413 and answer.error["code"] == "body_too_large"
        assert rig.seen() == [0] and rig.counters.errors == {"body_too_large": 1}

    with_envoy(scenario, change=change, replicas=1, limits={"body_bytes": 20_000})


def test_without_a_body() -> None:
    async def scenario(rig: PickerRig) -> None:
        rig.replicas[0].default = [Send(sized(b"{}"))]
        assert (await rig.ask(b"", "/v1/responses/r_1", method="GET")).status == 200
        assert rig.seen() == [1]

    with_envoy(scenario, replicas=1)


def test_turns_of_a_conversation_meet_their_prefix() -> None:
    async def scenario(rig: PickerRig) -> None:
        for replica in rig.replicas:
            replica.default = Cached()
        homes: list[set[str | None]] = [set() for _ in range(4)]
        for turn in range(3):
            texts = [f"conversation {talk} " * 300 + "and on " * 200 * turn for talk in range(4)]
            bodies = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in texts]
            for home, answer in zip(homes, await asyncio.gather(*map(rig.ask, bodies)), strict=True):
                home.add(answer.field("x-warmroute-replica"))
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                matched = int(answer.field("x-warmroute-matched-tokens") or 0)
                assert (cached > 1_000) is (matched > 1_000) is (turn > 0), (turn, cached, matched)
        assert all(len(home) == 1 for home in homes) and len(set.union(*homes)) == 2

    with_envoy(scenario, policy={"kind": "prefix_affinity"}, expose_routing=True)


class Cached:
    """What a replica answers that has the texts it has seen in its cache: 4 bytes are a token."""

    def __init__(self) -> None:
        self._seen: list[str] = []

    def __call__(self, request: SeenRequest) -> Plan:
        text = json.loads(request.body)["messages"][0]["content"]
        cached = max((_common(text, one) for one in self._seen), default=0)
        self._seen.append(text)
        return [Send(sized(completion(prompt=len(text) // 4, cached=cached // 4)))]


def _common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# --- who answers ----------------------------------------------------------------------------------


def test_of_a_replica_that_is_gone_the_next_in_line_answers() -> None:
    async def scenario(rig: PickerRig) -> None:
        await rig.replicas[0].kill()
        answer = await rig.ask(CHAT_STREAM)  # round robin: the first one's turn
        assert answer.status == 200 and answer.field("x-warmroute-replica") == "r1"
        assert answer.field("x-warmroute-reason") == "retry"
        await until(lambda: not rig.counters.in_flight)
        assert rig.counters.requests == {("r1", 200): 1} and rig.counters.retries == 1
        _, served = rig.rig.router.fleet.replicas
        assert rig.health() == ["suspect", "healthy"]
        assert served.requests == 1, "its booking was made anew where it was answered"

    with_envoy(scenario, health=SLOW_HEALTH, expose_routing=True)


def test_a_replica_s_error_is_its_own_and_is_tried_elsewhere() -> None:
    async def scenario(rig: PickerRig) -> None:
        rig.replicas[0].default = [Send(sized(b"{}", 503, "Service Unavailable"))]
        assert (await rig.ask()).status == 200
        rig.replicas[1].default = [Send(sized(b"{}", 500, "Internal Server Error"))]
        assert (await rig.ask()).status == 500  # not among those that the example tries again
        await until(lambda: not rig.counters.in_flight)
        assert rig.counters.requests == {("r1", 200): 1, ("r1", 500): 1}
        assert rig.health() == ["suspect", "suspect"]

    with_envoy(scenario, health=SLOW_HEALTH)


def test_a_client_s_error_is_not_the_replica_s() -> None:
    async def scenario(rig: PickerRig) -> None:
        rig.replicas[0].default = [Send(sized(b"{}", 400, "Bad Request"))]
        assert (await rig.ask()).status == 400
        await until(lambda: not rig.counters.in_flight)
        assert rig.health() == ["healthy"] and rig.counters.requests == {("r0", 400): 1}

    with_envoy(scenario, replicas=1)


def subset(*endpoints: str) -> Change:
    """The gateway says who may be picked."""

    def change(config: Config) -> None:
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        value = {"x-gateway-destination-endpoint-subset": list(endpoints)}
        typed: dict[str, Any] = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
            "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
        }
        manager["http_filters"].insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": typed})

    return change


def test_of_a_subset_alone_it_picks() -> None:
    ports: list[int] = []

    def change(config: Config) -> None:
        (locality,) = config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"]
        hosts = [one["endpoint"]["address"]["socket_address"] for one in locality["lb_endpoints"]]
        ports.extend(host["port_value"] for host in hosts)
        subset(f"127.0.0.1:{ports[1]}", "10.9.8.7:80")(config)

    async def scenario(rig: PickerRig) -> None:
        for _ in range(4):
            answer = await rig.ask()
            assert answer.status == 200
        assert rig.seen() == [0, 4, 0]
        sent_to = rig.replicas[1].requests[0].field("x-gateway-destination-endpoint")
        assert sent_to == f"127.0.0.1:{ports[1]}", "nor is anybody else next in line"

    with_envoy(scenario, change=change, replicas=3)


@pytest.mark.parametrize("endpoints", [(), ("10.9.8.7:80",)])
def test_a_subset_without_a_replica_is_refused(endpoints: tuple[str, ...]) -> None:
    async def scenario(rig: PickerRig) -> None:
        answer = await rig.ask()
        assert answer.status == 503 and answer.error["code"] == "no_replica" and rig.seen() == [0, 0]

    with_envoy(scenario, change=subset(*endpoints))


# --- refusals -------------------------------------------------------------------------------------


def test_nobody_usable_and_models_unknown() -> None:
    async def scenario(rig: PickerRig) -> None:
        unknown = await rig.ask({**CHAT, "model": "other"})
        assert unknown.status == 404 and unknown.error["code"] == "model_not_found"
        await rig.rig.admin("/drain/r0", "POST")
        answer = await rig.ask()
        assert answer.status == 503 and answer.error["code"] == "no_replica"
        assert answer.field("retry-after") == "1" and rig.seen() == [0]
        assert rig.counters.requests == {("", 404): 1, ("", 503): 1}

    with_envoy(scenario, replicas=1)


def test_keys_and_fields_that_steer_the_engine() -> None:
    async def scenario(rig: PickerRig) -> None:
        for fields in ({}, {"Authorization": "Bearer wrong"}):
            answer = await rig.ask(**fields)
            assert answer.status == 401 and answer.field("www-authenticate") == "Bearer"
        key = {"Authorization": "Bearer right"}
        assert (await rig.ask(**key)).status == 200
        assert rig.replicas[0].requests[0].field("authorization") == "Bearer sk-replica"
        answer = await rig.ask({**CHAT, "priority": 1}, **key)
        assert answer.status == 400 and answer.error["param"] == "priority"
        assert rig.seen() == [1]

    with_envoy(scenario, replicas=1, keys={"public": ["right"]}, api_key="sk-replica")


@MODES
def test_tenants_have_salts_of_their_own(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        keys = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}
        for key in (*keys, keys[0]):
            body = {**CHAT, "cache_salt": "theirs"}
            assert (await rig.ask(body, **key, **{"x-cache-salt": "theirs"})).status == 200
        sent = [request for replica in rig.replicas for request in replica.requests]
        assert all(json.loads(one.body) | {"cache_salt": ""} == {**CHAT, "cache_salt": ""} for one in sent)
        salts = sorted(json.loads(one.body)["cache_salt"] for one in sent)
        assert len(set(salts)) == 2 and "theirs" not in salts
        assert not any(one.field("authorization") or one.field("x-cache-salt") for one in sent)
        await until(lambda: not rig.counters.in_flight)
        counted = {name: one.statuses for name, one in rig.counters.tenants.items()}
        assert counted["acme"] == {200: 2} and counted["bolt"] == {200: 1}
        limited = await rig.ask(**keys[1])
        assert limited.status == 429 and limited.field("retry-after")

    members = [
        {"name": "acme", "keys": ["sk-a"]},
        {"name": "bolt", "keys": ["sk-b"], "limits": {"requests_per_s": 0.01}},
    ]
    with_envoy(
        scenario, change=change, tenants={"salt_secret": "a-secret-of-more-than-16", "members": members}
    )


def test_held_until_there_is_room() -> None:
    async def scenario(rig: PickerRig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].plans.append([Wait(gate), Send(stream(delta("x"), delta(None, finish="stop")))])
        long = {**CHAT_STREAM, "messages": [{"role": "user", "content": "long ago and far away " * 20_000}]}
        first, second = await rig.client(), await rig.client()
        await first.post(long)
        await until(lambda: rig.seen() == [1])
        await second.post(long)
        await until(lambda: rig.rig.router.fleet.held == 1)
        gate.set()
        assert (await first.answer()).status == 200
        assert (await second.answer()).status == 200 and rig.seen() == [2]

    with_envoy(scenario, **HOLD)


def test_held_too_long_is_shed_and_so_is_one_too_many() -> None:
    async def scenario(rig: PickerRig) -> None:
        rig.replicas[0].default = [Hang()]
        long = {**CHAT_STREAM, "messages": [{"role": "user", "content": "long ago and far away " * 20_000}]}
        first, second = await rig.client(), await rig.client()
        await first.post(long)
        await until(lambda: rig.seen() == [1])
        await second.post(long)
        await until(lambda: rig.rig.router.fleet.held == 1)
        full = await rig.ask(long)
        assert full.status == 429 and full.error["code"] == "hold_full"
        shed = await second.answer()
        assert shed.status == 429 and shed.error["code"] == "hold_timeout"
        assert shed.field("retry-after") == "5" and rig.rig.router.fleet.held == 0

    with_envoy(scenario, hold={"max_wait_s": 0.4, "max_requests": 1}, **HOLD)
