"""What the fleet hears of a request that a gateway asks about: its turn, answer, KV and end."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.config import RequestLogConfig
from router.endpoint_picker.ext_proc_pb2 import (
    BUFFERED,
    ProcessingResponse,
)
from router.proxy.request_log import RequestLog
from tests.endpoint_picker.talk import BODY, DESTINATION, ENDPOINTS, Talk, kinds, picked
from tests.fakes.fake_replica import usage_event
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until

# --- the fleet hears ------------------------------------------------------------------------------


def test_first_token_and_usage() -> None:
    talk = Talk()
    talk.head(BUFFERED)
    talk.body()
    talk.answer(last=False, **{"content-type": "text/event-stream"})
    ledger = next(iter(talk.fleet.replicas)).ledger
    talk.answer_body(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', last=False)
    assert (ledger.queued, ledger.decoding) == (1, 0)
    talk.answer_body(b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n', last=False)
    talk.answer_body(b"\n", last=False)
    assert (ledger.queued, ledger.decoding) == (0, 1) and sum(talk.counters.ttft_s.counts) == 1
    talk.answer_body(
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n', last=False
    )
    talk.answer_body(b"data: [DONE]\n\n", last=True)
    assert talk.at_rest() and (talk.counters.prompt_tokens, talk.counters.output_tokens) == (5, 2)


def test_what_a_prefill_teaches_waits_for_the_usage_if_hits_would_explain_it() -> None:
    """A prompt of 25,000 tokens is predicted to take seconds; it is answered at once."""
    talk = Talk()
    cost = next(iter(talk.fleet.replicas)).cost
    talk.head(BUFFERED)
    talk.body(
        json.dumps(CHAT_STREAM | {"messages": [{"role": "user", "content": "words " * 16_000}]}).encode()
    )
    talk.answer(last=False, **{"content-type": "text/event-stream"})
    talk.answer_body(b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n', last=False)
    assert cost.prefills_seen == 0
    talk.answer_body(usage_event(25_000, 2, 24_990) + b"data: [DONE]\n\n", last=True)
    assert talk.at_rest() and cost.prefills_seen == 1 and cost.prefill_factor > 0.8


def test_a_body_is_written_down_without_its_tenants_salt(tmp_path: Path) -> None:
    tenants = {"salt_secret": "of-acme" * 4, "members": [{"name": "acme", "keys": ["sk-a"]}]}
    talk = Talk(tenants=tenants)
    file = tmp_path / "requests.jsonl"
    log = RequestLog(RequestLogConfig(file=str(file), prompts="bodies"), talk.counters)
    talk.service.request_log = log
    talk.head(BUFFERED, authorization="Bearer sk-a")
    (reply,) = talk.body()
    assert b"cache_salt" in reply.request_body.response.body_mutation.body
    talk.answer(last=True)
    log.close()
    assert json.loads(file.read_text())["body"] == CHAT_STREAM and talk.at_rest()


def test_an_encoded_answer_is_passed_on_unread() -> None:
    talk = Talk()
    talk.head()
    talk.body()
    talk.answer(last=False, **{"content-encoding": "gzip", "content-type": "application/json"})
    (echo,) = talk.answer_body(b"\x1f\x8b", last=True)
    assert echo.response_body.response.body_mutation.streamed_response.body == b"\x1f\x8b" and talk.at_rest()


def test_gone_at_any_moment_leaves_nothing() -> None:
    steps: list[Callable[[Talk], Any]] = [
        lambda talk: talk.head(),
        lambda talk: talk.body(BODY[:9], last=False),
        lambda talk: talk.body(BODY[9:]),
        lambda talk: talk.answer(last=False),
        lambda talk: talk.answer_body(b"x", last=False),
    ]
    for count in range(len(steps) + 1):
        talk = Talk()
        for step in steps[:count]:
            step(talk)
        talk.pick.gone()
        assert (
            talk.at_rest() and sum(talk.counters.requests.values()) == talk.counters.client_disconnects == 1
        )
        talk.pick.gone()  # nor does it hurt to say so twice
        assert talk.counters.client_disconnects == 1


def test_a_fault_of_ours_is_told_where_it_can_be() -> None:
    early, late = Talk(), Talk()
    early.head()
    early.pick.failed_inside()
    (reply,) = [ProcessingResponse.FromString(one) for one in early.pick.out]
    assert reply.immediate_response.status.code == 500 and early.at_rest()
    late.head(BUFFERED)
    late.body()
    late.answer(last=False)
    late.pick.failed_inside()
    assert late.pick.out == [] and late.at_rest()


def test_an_answer_of_the_gateway_s_own_before_the_pick() -> None:
    talk = Talk()
    talk.head()
    assert kinds(talk.answer(408)) == ["response_headers"] and talk.at_rest()


def test_while_all_are_busy_it_waits() -> None:
    async def main() -> None:
        talk = Talk(policy={"kind": "predicted_finish"})
        one = talk.fleet.replicas
        for replica in list(one)[1:]:
            talk.fleet.drained(replica.index, 1.0)
        long = json.dumps({**CHAT, "stream": True, "messages": [{"role": "user", "content": "x " * 99_999}]})
        talk.head(BUFFERED)
        talk.body(long.encode())
        running = talk.pick
        talk.begin()
        talk.head(BUFFERED)
        assert talk.body(long.encode()) == [] and talk.pick.undecided and talk.fleet.held == 1
        running.gone()
        assert not talk.pick.undecided and talk.decisions == 2
        reply = ProcessingResponse.FromString(talk.pick.out.pop())
        assert picked(reply) == [ENDPOINTS[0]]
        talk.pick.gone()
        assert talk.at_rest()

    asyncio.run(main())


def test_a_body_of_countless_values_is_read_in_turns_of_the_loop() -> None:
    async def main() -> None:
        for values, response in ((70_000, "request_body"), (400_000, "immediate_response")):
            talk = Talk()
            talk.head(BUFFERED)
            body = b'{"model": "m", "messages": [%b0]}' % (b"{}," * values)
            pick = talk.pick
            assert talk.body(body)[1:] == [] and pick.undecided
            await until(lambda pick=pick: not pick.undecided)
            (reply,) = [ProcessingResponse.FromString(one) for one in talk.pick.out]
            assert reply.WhichOneof("response") == response
            talk.pick.gone()
            assert talk.at_rest()

    asyncio.run(main())


# --- KV that moves --------------------------------------------------------------------------------

LONG = json.dumps({"model": "m", "messages": [{"role": "user", "content": "long " * 8_000}]}).encode()


def kv_talk(*replicas: dict[str, Any], **config: Any) -> Talk:
    listed = [
        {"url": f"http://{endpoint}"} | keys for endpoint, keys in zip(ENDPOINTS, replicas, strict=False)
    ]
    return Talk(replicas=listed, policy={"kind": "predicted_finish"}, **config)


def told(replies: list[ProcessingResponse]) -> dict[str, str]:
    mutation = replies[0].request_headers.response.header_mutation
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def test_a_sidecar_is_told_who_computes_the_prompt() -> None:
    talk = kv_talk({"role": "prefill", "kv_pull": "llm-d"}, {"role": "decode", "kv_pull": "llm-d"})
    talk.head(**{"x-prefiller-host-port": "169.254.169.254:80"})
    fields = told(talk.body(LONG))
    assert fields[DESTINATION] == ENDPOINTS[1] and fields["x-prefiller-host-port"] == ENDPOINTS[0]
    prefill, decode = (talk.fleet.replicas[index].ledger for index in (0, 1))
    assert (prefill.queued, decode.queued, decode.decoding) == (1, 0, 1)
    talk.answer(last=False)
    talk.answer_body(b"{}", last=True)
    assert talk.at_rest() and talk.counters.handoffs == 1
    talk.begin()
    talk.head()
    fields = told(talk.body(BODY))
    assert fields[DESTINATION] == ENDPOINTS[1] and "x-prefiller-host-port" not in fields, "it is short"


def test_who_holds_the_prefix_is_named() -> None:
    pulls = {"kv_pull": "warmroute", "transfer": {"fixed_ms": 0, "us_per_token": 0.01}}
    talk = kv_talk(pulls | {"kv_source": "10.0.0.1:8400"}, pulls | {"kv_source": "10.0.0.2:8400"})
    talk.head()
    home = ENDPOINTS.index(told(talk.body(LONG))[DESTINATION].split(",")[0])
    talk.answer(last=False)
    talk.answer_body(b"{}", last=True)
    talk.fleet.replicas[home].room_price_s = 100.0
    talk.begin()
    talk.head(**{"x-warmroute-kv-source": "169.254.169.254:80"})
    fields = told(talk.body(LONG))
    assert fields[DESTINATION].split(",")[0] == ENDPOINTS[1 - home]
    assert fields["x-warmroute-kv-source"].startswith(f"10.0.0.{home + 1}:8400; tokens=")
    talk.pick.gone()
    assert talk.at_rest()
