"""One client request in two steps over real sockets: what each replica is sent, and every way it can end."""

import asyncio
import json
from typing import Any

import pytest

from replica.contract.kv_source import read_kv_source
from tests.fakes.fake_replica import (
    Close,
    Send,
    Wait,
    chunk,
    completion,
    head,
    openai_plan,
    sized,
)
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.two_pools import (
    KEY,
    LLMD,
    LONG,
    OURS,
    PARAMS,
    STREAM,
    VLLM,
    answerers,
    sent,
    source_of,
    vllm_prefill,
)


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
