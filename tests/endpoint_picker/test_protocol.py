"""What the picker says to each message, in every way in which a gateway may send bodies; no Envoy needed."""

from collections.abc import Callable
from typing import Any

import pytest

from router.endpoint_picker.ext_proc_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    NONE,
    STREAMED,
    ProcessingRequest,
)
from tests.endpoint_picker.talk import BODY, ENDPOINTS, Talk, add, kinds, picked
from tests.fakes.tenants import tenants


def test_a_closed_path_is_refused_from_its_head() -> None:
    talk = Talk(refused_paths=["/v1/load_lora_adapter"])
    for path in ("/v1/load%5Flora_adapter", "/v1/load_lora_adapter#a"):
        (reply,) = talk.head(**{":path": path})
        refused = reply.immediate_response
        assert refused.status.code == 403 and b"path_refused" in refused.body
        talk.begin()
    assert talk.head() == []


def test_a_tenant_with_models_of_its_own_gets_no_replicas_list_of_all() -> None:
    talk = Talk(tenants=tenants({"name": "acme", "keys": ["sk-a"], "models": ["m"]}))
    (reply,) = talk.head(last=True, authorization="Bearer sk-a", **{":method": "GET", ":path": "/v1/models"})
    refused = reply.immediate_response
    assert refused.status.code == 403 and b"model_not_allowed" in refused.body


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
