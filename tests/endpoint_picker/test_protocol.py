"""What the picker says to each message, in every way in which a gateway may send bodies; no Envoy needed."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import RequestLogConfig, parse_config
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.ext_proc_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    NONE,
    STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from router.endpoint_picker.pick import Pick
from router.proxy.counters import Counters
from router.proxy.fleet_config import make_fleet
from router.proxy.request_head import STEERING_HEADERS
from router.proxy.request_log import RequestLog
from router.proxy.service import Service
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until

DESTINATION = "x-gateway-destination-endpoint"
ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::3]:8000"]
BODY = json.dumps(CHAT_STREAM).encode()


class Talk:
    """One request with a picker of three replicas."""

    def __init__(self, **config: Any) -> None:
        urls = [{"url": f"http://{endpoint}"} for endpoint in ENDPOINTS]
        made = parse_config({"replicas": urls, "policy": {"kind": "round_robin"}, "seed": 1} | config, "test")
        self.fleet = make_fleet(made)
        for replica in self.fleet.replicas:
            self.fleet.probe_succeeded(replica.index, 0.0)
        self.counters = Counters()
        self.service = Service(self.fleet, made, self.counters, lambda: 1.0)
        self.endpoints = Endpoints(self.fleet)
        self.decisions = 0
        self.begin()

    def begin(self) -> None:
        """The next request."""
        self.pick = Pick(self.service, self.endpoints, self._decided)

    def _decided(self) -> None:
        self.decisions += 1

    def say(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """A message; the replies to it."""
        self.pick.take(ProcessingRequest.FromString(message.SerializeToString()))
        out = [ProcessingResponse.FromString(one) for one in self.pick.out]
        self.pick.out.clear()
        return out

    def head(
        self, mode: int | None = FULL_DUPLEX_STREAMED, *, last: bool = False, **fields: str
    ) -> list[ProcessingResponse]:
        """The request's head; without a ``mode`` the gateway does not say how it sends bodies."""
        message = ProcessingRequest()
        message.request_headers.end_of_stream = last
        add(message.request_headers, {":method": "POST", ":path": "/v1/chat/completions", **fields})
        if mode is not None:
            message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
            message.protocol_config.response_body_mode = mode  # type: ignore[assignment]
        return self.say(message)

    def body(self, body: bytes = BODY, *, last: bool = True) -> list[ProcessingResponse]:
        """A piece of the request's body."""
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = body, last
        return self.say(message)

    def answer(
        self, status: int = 200, *, served: str | None = None, last: bool = True, **fields: str
    ) -> Any:
        """The answer's head."""
        message = ProcessingRequest()
        message.response_headers.end_of_stream = last
        add(message.response_headers, {":status": str(status), **fields})
        if served is not None:
            metadata = message.metadata_context.filter_metadata["envoy.lb"]
            metadata.update({"x-gateway-destination-endpoint-served": served})
        return self.say(message)

    def answer_body(self, body: bytes, *, last: bool) -> list[ProcessingResponse]:
        """A piece of the answer's body."""
        message = ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = body, last
        return self.say(message)

    def at_rest(self) -> bool:
        """Nothing is booked."""
        ledgers = [replica.ledger for replica in self.fleet.replicas]
        return not self.counters.in_flight and not any(one.in_flight for one in ledgers)


def add(headers: Any, fields: dict[str, str]) -> None:
    """Set header fields as Envoy does: values as bytes."""
    for name, value in fields.items():
        headers.headers.headers.add(key=name, raw_value=value.encode())


def picked(reply: ProcessingResponse) -> list[str]:
    """The endpoints that ``reply`` names; header and metadata must agree."""
    kind = reply.WhichOneof("response")
    assert kind in ("request_headers", "request_body")
    mutation = getattr(reply, kind).response.header_mutation
    fields = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
    assert fields.keys() == {DESTINATION, "accept-encoding"}
    assert list(mutation.remove_headers) == [
        *("authorization", "api-key", "x-api-key"),
        *(name.decode() for name in sorted(STEERING_HEADERS)),
    ]
    assert all(one.append_action == one.OVERWRITE_IF_EXISTS_OR_ADD for one in mutation.set_headers)
    assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == fields[DESTINATION]
    return fields[DESTINATION].split(",")


def kinds(replies: list[ProcessingResponse]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in replies]


def test_a_closed_path_is_refused_from_its_head() -> None:
    talk = Talk(refused_paths=["/v1/load_lora_adapter"])
    (reply,) = talk.head(**{":path": "/v1/load%5Flora_adapter"})
    assert reply.immediate_response.status.code == 403 and b"path_refused" in reply.immediate_response.body
    talk.begin()
    assert talk.head() == []


# --- ways to send bodies --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, None])
def test_in_pieces_the_head_waits_for_the_whole_body_which_goes_back(mode: int | None) -> None:
    talk = Talk()
    assert talk.head(mode) == [] and talk.body(BODY[:9], last=False) == []
    assert talk.fleet.replicas[0].ledger.queued == 0
    first, body = talk.body(BODY[9:])
    assert picked(first) == ENDPOINTS
    piece = body.request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (BODY, True) and talk.fleet.replicas[0].ledger.queued == 1
    assert kinds(talk.answer(last=False)) == ["response_headers"]
    (echo,) = talk.answer_body(b"data: [DONE]\n\n", last=True)
    piece = echo.response_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b"data: [DONE]\n\n", True) and talk.at_rest()


@pytest.mark.parametrize("size", [0, 1, 61_999, 62_000, 62_001, 200_000])
def test_a_body_goes_back_in_pieces_below_64_kib(size: int) -> None:
    talk, body = Talk(), b"x" * size
    talk.head()
    _, *replies = talk.body(body)
    pieces = [one.request_body.response.body_mutation.streamed_response for one in replies]
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.body) <= 62_000 for piece in pieces) and all(p.body for p in pieces[1:])


@pytest.mark.parametrize("mode", [BUFFERED, BUFFERED_PARTIAL])
def test_a_whole_body_is_replied_to_with_the_pick(mode: int) -> None:
    talk = Talk()
    (reply,) = talk.head(mode)
    assert not reply.request_headers.HasField("response") and not reply.HasField("dynamic_metadata")
    (reply,) = talk.body(last=mode == BUFFERED)
    assert picked(reply) == ENDPOINTS and not reply.request_body.response.HasField("body_mutation")
    talk.answer(last=False)
    (reply,) = talk.answer_body(b"{}", last=True)
    assert not reply.response_body.HasField("response") and talk.at_rest()


@pytest.mark.parametrize("mode", [NONE, STREAMED])
def test_without_the_body_in_time_it_picks_by_the_head(mode: int) -> None:
    talk = Talk()
    (reply,) = talk.head(mode)
    assert picked(reply) == ENDPOINTS
    if mode == STREAMED:
        (reply,) = talk.body()
        assert kinds([reply]) == ["request_body"] and not reply.request_body.HasField("response")
    talk.answer(last=False)
    if mode == NONE:  # the end of the answer is not to be seen
        assert not talk.at_rest()
        talk.pick.gone()
    else:
        talk.answer_body(b"{}", last=True)
    assert talk.at_rest() and talk.counters.requests == {("10.0.0.1:8000", 200): 1}


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED, NONE])
def test_a_request_without_a_body_is_picked_for_at_once(mode: int) -> None:
    talk = Talk()
    (reply,) = talk.head(mode, last=True)
    assert kinds([reply]) == ["request_headers"] and picked(reply) == ENDPOINTS
    talk.answer(204)
    assert talk.at_rest()


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
def test_trailers(mode: int) -> None:
    talk, trailers, last = Talk(), ProcessingRequest(), ProcessingRequest()
    trailers.request_trailers.SetInParent()
    last.response_trailers.SetInParent()
    talk.head(mode)
    replies = talk.body(last=False) + talk.say(trailers)
    expected = ["request_headers", "request_body", "request_trailers"]
    assert kinds(replies) == expected[mode == BUFFERED :]
    assert not replies[-2].request_body.response.body_mutation.streamed_response.end_of_stream
    talk.answer(last=False)
    assert kinds(talk.say(last)) == ["response_trailers"] and talk.at_rest()


# --- who may be picked, who was -------------------------------------------------------------------


def with_subset(value: Any) -> Callable[[ProcessingRequest], None]:
    def set_it(message: ProcessingRequest) -> None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": value})

    return set_it


@pytest.mark.parametrize("value", [[ENDPOINTS[2], "1.2.3.4:5"], f"{ENDPOINTS[2]}, 1.2.3.4:5"])
def test_of_a_subset_as_a_list_or_as_text(value: Any) -> None:
    talk, message = Talk(), ProcessingRequest()
    message.request_headers.end_of_stream = True
    add(message.request_headers, {":method": "GET", ":path": "/v1/models/m"})
    with_subset(value)(message)
    (reply,) = talk.say(message)
    assert picked(reply) == [ENDPOINTS[2]]


@pytest.mark.parametrize(("attempts", "named"), [(1, 1), (2, 2), (9, 3)])
def test_as_many_endpoints_as_there_may_be_attempts(attempts: int, named: int) -> None:
    talk = Talk(retries={"attempts": attempts})
    (reply,) = talk.head(last=True)
    assert picked(reply) == ENDPOINTS[:named]


def test_a_replica_that_is_named_by_its_host_gets_nothing() -> None:
    talk = Talk(replicas=[{"url": "http://vllm-0:8000"}, {"url": "http://10.0.0.2"}])
    for _ in range(3):
        talk.begin()
        (reply,) = talk.head(last=True)
        assert picked(reply) == ["10.0.0.2:80"]


def test_of_the_endpoint_that_served_the_booking_is_made_anew() -> None:
    talk = Talk()
    talk.head(BUFFERED)
    talk.body()
    first, second, _ = talk.fleet.replicas
    assert first.ledger.queued == 1
    talk.answer(last=False, served=ENDPOINTS[1])
    assert (first.ledger.queued, second.ledger.queued) == (0, 1)
    talk.answer_body(b"data: [DONE]\n\n", last=True)
    assert talk.at_rest() and talk.counters.requests == {("10.0.0.2:8000", 200): 1}
    assert talk.counters.retries == 1 and first.health.state.value == "suspect"


@pytest.mark.parametrize("served", [ENDPOINTS[0], None, "9.9.9.9:1", ""])
def test_who_served_is_the_first_one_a_stranger_or_not_told(served: str | None) -> None:
    talk = Talk()
    talk.head(BUFFERED)
    talk.body()
    talk.answer(served=served)
    assert talk.at_rest() and talk.counters.requests == {("10.0.0.1:8000", 200): 1}


def test_what_a_failed_answer_says_of_its_replica() -> None:
    for status, fields, state in (
        (500, {}, "suspect"),
        (503, {"retry-after": "1"}, "healthy"),
        (429, {}, "healthy"),
        (400, {}, "healthy"),
    ):
        talk = Talk()
        talk.head(BUFFERED)
        talk.body()
        talk.answer(status, **fields)
        assert talk.at_rest() and next(iter(talk.fleet.replicas)).health.state.value == state, status


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
