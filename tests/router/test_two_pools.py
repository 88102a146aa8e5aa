"""One client request in two steps over real sockets: what each replica is sent, and every way it can end."""

import asyncio
import json
import random
from typing import Any

import pytest

from replica.contract.kv_source import read_kv_source
from tests.fakes.fake_replica import (
    Close,
    FakeReplica,
    Hang,
    Plan,
    Reset,
    SeenRequest,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    openai_plan,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig

LONG = {"model": "m", "messages": [{"role": "user", "content": "long " * 8_000}]}
"""10,000 tokens: 629 ms of prefill, 69 ms to move."""
STREAM = LONG | {"stream": True, "max_tokens": 50, "min_tokens": 5, "stream_options": {"include_usage": True}}
KEY = "of-all-routers"
PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [1, 2],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}

PREFILL = {"role": "prefill", "kv_source": "10.0.0.1:8400"}
DECODE = {"role": "decode", "kv_pull": "warmroute"}
OURS = [PREFILL, DECODE, DECODE]
VLLM = [{"role": role, "kv_pull": "vllm"} for role in ("prefill", "decode")]


def sent(replica: FakeReplica, at: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(replica.requests[at].body)
    return body


def answerers(rig: Rig) -> list[FakeReplica]:
    return [one for one in rig.replicas[1:] if one.requests]


def vllm_prefill(request: SeenRequest) -> Plan:
    """What vLLM answers with its NIXL connector."""
    assert json.loads(request.body)["kv_transfer_params"]["do_remote_decode"] is True
    answer = json.loads(completion(prompt=10_000)) | {"kv_transfer_params": PARAMS}
    return [Send(sized(json.dumps(answer).encode()))]


def source_of(request: SeenRequest) -> str:
    value = request.field("x-warmroute-kv-source")
    source = read_kv_source(value or "")
    assert source is not None and source.signed_by(KEY.encode()), value
    return source.address


@pytest.mark.parametrize("body", [LONG, STREAM])
def test_a_long_cold_prompt_goes_through_both_pools_and_the_second_time_straight_to_decode(
    body: dict[str, Any],
) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(body, **{"x-request-id": "once"})
        assert (answer.status, answer.whole) == (200, True)
        assert answer.field("x-warmroute-reason") == "handoff"
        first = sent(rig.replica)
        assert first["messages"] == body["messages"]
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert not {"min_tokens", "stream_options", "kv_transfer_params"} & set(first)
        (second,) = answerers(rig)
        assert json.loads(second.requests[0].body) == body, "the client's own"
        assert source_of(second.requests[0]) == "10.0.0.1:8400"
        assert rig.replica.requests[0].field("x-warmroute-kv-source") is None
        assert [one.requests[0].field("x-request-id") for one in (rig.replica, second)] == ["once", "once"]
        assert (rig.counters.handoffs, rig.counters.failed_handoffs) == (1, 0)
        assert rig.counters.prompt_tokens == 10, "one client request: its usage counts once"
        again = await rig.ask(body)
        assert again.field("x-warmroute-reason") == "warm"
        assert len(rig.replica.requests) == 1 and len(second.requests) == 2
        assert second.requests[1].field("x-warmroute-kv-source") is None

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"}, expose_routing=True, kv_source_key=KEY)


def test_short_prompts_other_paths_and_batches_take_one_step() -> None:
    async def scenario(rig: Rig) -> None:
        prompts = {"model": "m", "prompt": ["long " * 8_000, "other " * 8_000]}
        for body, path in (
            (CHAT, "/v1/chat/completions"),
            (prompts, "/v1/completions"),
            ({"model": "m", "input": "long " * 8_000}, "/v1/embeddings"),
        ):
            assert (await rig.ask(body, path)).status == 200
        assert not rig.replica.requests and rig.counters.handoffs == 0

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_vllm_gets_the_parameters_its_prefill_answered() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = vllm_prefill
        answer = await rig.ask(STREAM)
        assert answer.status == 200 and answer.whole
        assert sent(rig.replicas[1]) == STREAM | {"kv_transfer_params": PARAMS}
        raw = json.dumps(STREAM).encode()
        assert rig.replicas[1].requests[0].body.startswith(raw[:-1]), "byte for byte, and one field more"
        assert rig.replicas[1].requests[0].field("x-warmroute-kv-source") is None

    with_rig(scenario, each=VLLM, policy={"kind": "predicted_finish"})


def test_vllm_without_a_connector_computes_where_it_answers() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(LONG)
        assert answer.status == 200
        assert sent(rig.replicas[1]) == LONG
        assert (rig.counters.handoffs, rig.counters.failed_handoffs) == (0, 1)

    with_rig(scenario, each=VLLM, policy={"kind": "predicted_finish"})


def test_vllms_parameters_go_to_one_replica_only() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = vllm_prefill
        rig.replicas[1].plans.append([Close()])
        rig.replicas[2].plans.append([Close()])
        answer = await rig.ask(LONG)
        assert answer.status == 200 or rig.counters.retries
        tried = [request for one in rig.replicas[1:] for request in one.requests]
        told = ["kv_transfer_params" in json.loads(request.body) for request in tried]
        assert told.count(True) == 1 and len(told) > 1, "what it names may be gone"

    with_rig(scenario, each=[*VLLM, VLLM[1]], policy={"kind": "predicted_finish"})


@pytest.mark.parametrize(
    "plan",
    [
        [Close()],
        [Reset()],
        [Send(b"SSH-2.0\r\n\r\n")],
        [Send(sized(b"{}", 500, "No"))],
        [Send(sized(b"{}", 429, "No"))],
        [Send(sized(b"{}", 400, "No"))],
        [Send(sized(completion())[:-9]), Close()],
        [Send(head(transfer_encoding="chunked") + chunk(completion()) + b"zz\r\n"), Close()],
        [Send(head(content_length=str(8 << 20)) + bytes(5 << 20)), Hang()],
    ],
    ids=["closed", "reset", "garbage", "500", "429", "400", "cut", "bad chunks", "endless"],
)
def test_what_the_prefill_pool_does_not_compute_the_decode_pool_does(plan: Plan) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = plan
        answer = await rig.ask(LONG)
        assert answer.status == 200 and answer.body == completion()
        (second,) = answerers(rig)
        assert sent(second) == LONG
        assert (rig.counters.handoffs, rig.counters.failed_handoffs) == (0, 1)

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_the_prefills_answer_may_come_in_any_framing(framing: str) -> None:
    async def scenario(rig: Rig) -> None:
        body = json.dumps(json.loads(completion()) | {"kv_transfer_params": PARAMS}).encode()
        rig.replica.default = {
            "length": [Send(sized(body)[:40]), Send(sized(body)[40:])],
            "chunked": [
                Send(head(transfer_encoding="chunked") + chunk(body[:9])),
                Send(chunk(body[9:]) + b"0\r\n\r\n"),
            ],
            "close": [Send(head() + body), Close()],
        }[framing]
        assert (await rig.ask(LONG)).status == 200
        assert sent(rig.replicas[1])["kv_transfer_params"] == PARAMS

    with_rig(scenario, each=VLLM, policy={"kind": "predicted_finish"})


def test_another_prefill_replica_is_tried_first() -> None:
    async def scenario(rig: Rig) -> None:
        for one in rig.replicas[:2]:
            one.plans.append([Close()])
        answer = await rig.ask(LONG)
        assert answer.status == 200
        computed = [one for one in rig.replicas[:2] if one.requests]
        assert len(computed) == 2, "both were asked, both failed"
        assert (rig.counters.retries, rig.counters.failed_handoffs) == (1, 1)
        assert (await rig.ask(LONG | {"user": "again"})).status == 200

    with_rig(scenario, each=[PREFILL, PREFILL, DECODE], policy={"kind": "predicted_finish"})


def test_nobody_left_to_answer_is_said() -> None:
    async def scenario(rig: Rig) -> None:
        rig.drain(1)
        rig.drain(2)
        answer = await rig.ask(LONG)
        assert answer.status == 503 and not rig.replica.requests

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_the_decode_pool_leaves_while_the_prompt_is_computed() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        asked = asyncio.create_task(rig.ask(LONG))
        await until(lambda: rig.replica.answering == 1)
        rig.drain(1)
        rig.drain(2)
        gate.set()
        answer = await asked
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "no_replica"

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("step", [1, 2])
def test_the_client_leaves_in_either_step(step: int) -> None:
    async def scenario(rig: Rig) -> None:
        if step == 1:
            rig.replica.default = [Hang()]
        else:
            for one in rig.replicas[1:]:
                one.default = [Hang()]
        client = await rig.client()
        await client.post(STREAM)
        waiting = rig.replicas[:1] if step == 1 else rig.replicas[1:]
        await until(lambda: any(one.answering for one in waiting))
        assert rig.booked()["in_flight"] == 1 and rig.booked()["queued"] == 1
        client.leave()
        await until(lambda: any(one.aborted for one in waiting))
        assert not any(rig.booked().values())
        assert rig.counters.client_disconnects == 1
        if step == 1:
            assert not answerers(rig)

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_a_prefill_that_says_nothing_is_given_up_and_computed_elsewhere() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        answer = await rig.ask(LONG)
        assert answer.status == 200
        assert rig.replica.aborted == 1 and rig.counters.failed_handoffs == 1

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"}, timeouts={"first_byte_s": 0.2})


def test_the_answer_fails_after_its_first_byte_and_is_not_begun_again() -> None:
    async def scenario(rig: Rig) -> None:
        for one in rig.replicas[1:]:
            one.default = [Send(sized(completion())[:-5]), Reset()]
        answer = await rig.ask(LONG)
        assert not answer.whole
        assert len(rig.replica.requests) == 1 and len(answerers(rig)) == 1

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_held_prefills_go_out_one_after_the_other() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        bodies = [
            LONG | {"messages": [{"role": "user", "content": f"{n} " + "long " * count}]}
            for n, count in enumerate((2_000, 8_000, 8_000))
        ]
        asked = [asyncio.create_task(rig.ask(body)) for body in bodies]
        await until(lambda: rig.fleet.held + sum(len(one.requests) for one in rig.replicas) == 3)
        assert rig.fleet.held > 0
        gate.set()
        assert [(await one).status for one in asked] == [200] * 3

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_without_roles_a_replica_is_told_who_has_the_prefix() -> None:
    async def scenario(rig: Rig) -> None:
        for one in rig.replicas:
            one.default = [Send(sized(completion(prompt=10_000)))]
        assert (await rig.ask(LONG)).status == 200
        (home,) = [one for one in rig.replicas if one.requests]
        other = rig.replicas[1 - rig.replicas.index(home)]
        rig.fleet.replicas[rig.replicas.index(home)].room_price_s = 10.0  # its KV room is full
        assert (await rig.ask(LONG)).status == 200
        assert len(other.requests) == 1
        assert source_of(other.requests[0]) == ("10.0.0.1:8400" if home is rig.replica else "10.0.0.2:8400")
        named = read_kv_source(other.requests[0].field("x-warmroute-kv-source") or "")
        assert named is not None and 9_000 < (named.tokens or 0) <= 10_010
        assert rig.counters.kv_sources_named == 1

    # The fakes compute in no time, and the router learns it: only a still faster transfer is worth anything.
    pulls = {"kv_pull": "warmroute", "transfer": {"fixed_ms": 0, "us_per_token": 0.01}}
    each = [pulls | {"kv_source": f"10.0.0.{number}:8400"} for number in (1, 2)]
    with_rig(scenario, each=each, policy={"kind": "predicted_finish"}, kv_source_key=KEY)


@pytest.mark.parametrize("each", [[{}, {}], OURS])
def test_a_client_cannot_name_a_source(each: list[dict[str, Any]]) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, **{"x-warmroute-kv-source": "169.254.169.254:80"})
        assert answer.status == 200
        (seen,) = [request for one in rig.replicas for request in one.requests]
        assert seen.field("x-warmroute-kv-source") is None
        answer = await rig.ask(CHAT | {"kv_transfer_params": PARAMS})
        assert answer.status == 400

    with_rig(scenario, each=each, policy={"kind": "predicted_finish"})


def test_a_fleet_without_roles_sends_what_it_sent_before() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = openai_plan
        assert (await rig.ask(LONG)).status == 200
        (seen,) = [request for one in rig.replicas for request in one.requests]
        assert json.loads(seen.body) == LONG and seen.field("x-warmroute-kv-source") is None
        assert rig.counters.handoffs == 0

    with_rig(scenario, replicas=2, policy={"kind": "predicted_finish"})


LLMD = [{"role": role, "kv_pull": "llm-d"} for role in ("prefill", "decode", "decode")]


@pytest.mark.parametrize("body", [LONG, STREAM])
def test_a_sidecar_runs_both_steps_and_both_are_booked(body: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        for one in rig.replicas[1:]:
            one.default = lambda seen: [Wait(gate), *openai_plan(seen)]
        asked = asyncio.create_task(rig.ask(body, **{"x-prefiller-host-port": "169.254.169.254:80"}))
        await until(lambda: any(one.answering for one in rig.replicas[1:]))
        ledgers = [one.ledger for one in rig.fleet.replicas]
        assert ledgers[0].queued == 1, "the prompt is computed there"
        assert [sum(getattr(one, name) for one in ledgers[1:]) for name in ("queued", "decoding")] == [0, 1]
        gate.set()
        assert (await asked).status == 200
        (second,) = answerers(rig)
        assert second.requests[0].field("x-prefiller-host-port") == f"127.0.0.1:{rig.replica.port}"
        assert sent(second) == body and not rig.replica.requests
        assert rig.counters.handoffs == 1
        again = await rig.ask(body)
        assert again.status == 200 and second.requests[1].field("x-prefiller-host-port") is None, "warm"

    with_rig(scenario, each=LLMD, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("end", ["client leaves", "closed", "500", "nobody"])
def test_a_sidecars_two_bookings_end_together(end: str) -> None:
    async def scenario(rig: Rig) -> None:
        plan: Plan = {"closed": [Close()], "500": [Send(sized(b"{}", 500, "No"))]}.get(end, [Hang()])
        for one in rig.replicas[1:]:
            one.plans.append(plan)
        if end == "nobody":
            rig.drain(1)
            rig.drain(2)
            assert (await rig.ask(LONG)).status == 503
        elif end == "client leaves":
            client = await rig.client()
            await client.post(LONG)
            await until(lambda: any(one.answering for one in rig.replicas[1:]))
            client.leave()
            await until(lambda: any(one.aborted for one in rig.replicas[1:]))
        else:
            await rig.ask(LONG)
            tried = [request for one in rig.replicas[1:] for request in one.requests]
            named = [request.field("x-prefiller-host-port") is not None for request in tried]
            assert len(named) > 1 and named.count(True) == 1, "the next one computes"
        assert not any(rig.booked().values())

    with_rig(scenario, each=LLMD, policy={"kind": "predicted_finish"})


def test_vllms_parameters_are_sent_again_where_the_request_was_never_seen() -> None:
    """The replica closed an idle connection as the request came."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = vllm_prefill
        rig.replicas[1].close_idle = True
        assert (await rig.ask(CHAT)).status == 200
        assert (await rig.ask(LONG)).status == 200
        assert sent(rig.replicas[1], -1)["kv_transfer_params"] == PARAMS

    with_rig(scenario, each=VLLM, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("pull", ["warmroute", "vllm", "llm-d"])
def test_whatever_breaks_in_either_step_every_request_ends_once(pull: str) -> None:
    """Sixty requests, a third of all steps broken in some way, clients that leave: nothing stays booked."""
    rng = random.Random(pull)

    def unsteady(seen: SeenRequest) -> Plan:
        healthy: Plan = [Send(sized(completion(prompt=10_000)))]
        if json.loads(seen.body)["stream"]:
            healthy = [Send(stream(delta("hel"), delta(None, finish="stop"), usage_event(10_000, 2, 4)))]
        elif b"do_remote_decode" in seen.body:
            healthy = vllm_prefill(seen)
        faults: list[Plan] = [
            [Close()],
            [Reset()],
            [Send(b"HTTP/1.1 200 OK\r\n"), Close()],
            [Send(sized(b"{}", 500, "No"))],
            [Send(sized(b"{}", 429, "No", retry_after="1"))],
            [Send(sized(b"{}", 400, "No"))],
            [Send(sized(completion())[:-9]), Reset()],
        ]
        return rng.choice(faults) if rng.random() < 0.33 else healthy

    async def scenario(rig: Rig) -> None:
        for one in rig.replicas:
            one.default = unsteady

        async def asks(number: int) -> int | None:
            text = f"{number} " + "long " * rng.choice((10, 4_000, 8_000))
            body = LONG | {"messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
            if number % 7 == 0:
                client = await rig.client()
                await client.post(body)
                client.leave()
                return None
            answer = await rig.ask(body)
            assert answer.status in (200, 400, 429, 500, 502, 503), answer.status
            return answer.status

        statuses = []
        for first in range(0, 60, 12):
            statuses += await asyncio.gather(*(asks(number) for number in range(first, first + 12)))
        assert statuses.count(200) > 20
        await until(lambda: not any(rig.booked().values()))
        assert rig.counters.handoffs > 5

    # The fakes compute in no time, and the router learns it.
    ways = {"kv_source": "10.0.0.1:8400"} if pull == "warmroute" else {"kv_pull": pull}
    decode = {"role": "decode", "kv_pull": pull, "transfer": {"fixed_ms": 0, "us_per_token": 0.001}}
    each = [{"role": "prefill"} | ways] * 2 + [decode] * 3
    with_rig(
        scenario,
        each=each,
        policy={"kind": "predicted_finish"},
        health={"failures_to_eject": 1_000},
        retries={"attempts": 4, "budget_floor": 1_000},
    )
