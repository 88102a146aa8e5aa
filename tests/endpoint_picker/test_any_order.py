"""Messages of a gateway in any order: nobody gets in without a head, and a booking is given back once."""

import random
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
    ProcessingResponse,
)
from tests.endpoint_picker.talk import BODY, ENDPOINTS, Talk, kinds
from tests.fakes.envoy import Config, PickerRig, filter_of, needs_envoy, with_envoy
from tests.fakes.proxy_rig import CHAT
from tests.fakes.tenants import A, tenants

Step = Callable[[Talk], list[ProcessingResponse]]


def trailers(talk: Talk) -> list[ProcessingResponse]:
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    return talk.say(message)


def answer_trailers(talk: Talk) -> list[ProcessingResponse]:
    message = ProcessingRequest()
    message.response_trailers.SetInParent()
    return talk.say(message)


def head(mode: int) -> Step:
    return lambda talk: talk.head(mode, authorization="Bearer sk-a")


def piece(talk: Talk) -> list[ProcessingResponse]:
    return talk.body(BODY[:9], last=False)


def rest(talk: Talk) -> list[ProcessingResponse]:
    return talk.body()


def too_much(talk: Talk) -> list[ProcessingResponse]:
    return talk.body(b"x" * 3_000)


def tenants_talk() -> Talk:
    return Talk(tenants=tenants(), limits={"body_bytes": 2_000})


def at_rest(talk: Talk) -> bool:
    quotas = talk.fleet.tenants.quotas.values()
    return talk.at_rest() and not any(one.in_flight or one.held for one in quotas)


PIECES, WHOLE = head(FULL_DUPLEX_STREAMED), head(BUFFERED)


@pytest.mark.parametrize(
    "steps",
    [
        [rest],
        [too_much],
        [trailers],
        [answer_trailers],
        [PIECES, piece, PIECES],
        [PIECES, rest, PIECES],
        [WHOLE, rest, WHOLE],
    ],
)
def test_without_its_head_first_nothing_is_picked(steps: list[Step]) -> None:
    """The head has the key. A second one ends the request."""
    talk = tenants_talk()
    for step in steps[:-1]:
        step(talk)
    (reply,) = steps[-1](talk)
    assert reply.immediate_response.status.code == 500 and b"gateway_order" in reply.immediate_response.body
    talk.pick.gone()
    assert at_rest(talk) and sum(talk.counters.requests.values()) == 1


@pytest.mark.parametrize(
    "steps",
    [[PIECES, rest, rest], [PIECES, rest, too_much], [PIECES, trailers, piece], [WHOLE, rest, too_much]],
)
def test_a_piece_that_comes_behind_the_end_is_passed_over(steps: list[Step]) -> None:
    """Envoy may send the last piece of a long body again."""
    talk = tenants_talk()
    replies = [reply for step in steps for reply in step(talk)]
    assert not any(reply.HasField("immediate_response") for reply in replies)
    pieces = [one.request_body.response.body_mutation.streamed_response.body for one in replies]
    assert b"".join(pieces).count(BODY[1:9]) == (steps[0] is PIECES and steps[1] is rest)
    talk.answer()
    assert at_rest(talk) and sum(talk.counters.requests.values()) == 1


def test_trailers_alone() -> None:
    """In pieces the pick goes with the head, and no piece goes back; else the head is gone already."""
    talk = tenants_talk()
    PIECES(talk)
    replies = trailers(talk)
    assert kinds(replies) == ["request_headers", "request_trailers"]
    talk.answer()
    assert at_rest(talk)
    talk.begin()
    WHOLE(talk)
    (reply,) = trailers(talk)
    assert reply.immediate_response.status.code == 400 and at_rest(talk)


def test_any_messages_in_any_order_leave_nothing() -> None:
    """2,000 streams of up to 8 messages, in every mode."""
    rng = random.Random(1)
    modes = [FULL_DUPLEX_STREAMED, BUFFERED, BUFFERED_PARTIAL, STREAMED, NONE]
    for _ in range(2_000):
        talk, mode = tenants_talk(), rng.choice(modes)
        steps: list[Callable[[Talk], Any]] = [
            head(mode),
            lambda talk, mode=mode: talk.head(mode, last=True, authorization="Bearer sk-a"),
            piece,
            rest,
            too_much,
            trailers,
            answer_trailers,
            lambda talk: talk.answer(200, last=False, served=rng.choice([None, *ENDPOINTS, "10.9.9.9:1"])),
            lambda talk: talk.answer(503),
            lambda talk: talk.answer_body(b"data: {}\n\n", last=False),
            lambda talk: talk.answer_body(b"data: [DONE]\n\n", last=True),
            lambda talk: talk.say(ProcessingRequest()),
        ]
        done = [head(mode)] if rng.random() < 0.9 else []
        done += rng.choices(steps, k=rng.randrange(8))
        for step in done:
            if not talk.pick.over:
                step(talk)
        talk.pick.gone()
        assert at_rest(talk) and sum(talk.counters.requests.values()) == 1


# --- behind a real Envoy --------------------------------------------------------------------------

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-a\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _manager(config: Config) -> Config:
    listener = config["static_resources"]["listeners"][0]
    manager: Config = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


@needs_envoy
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
def test_behind_envoy_a_body_in_countless_pieces_or_none_with_trailers(mode: str) -> None:
    def change(config: Config) -> None:
        _manager(config)["http_protocol_options"] = {"enable_trailers": True}
        (host,) = _manager(config)["route_config"]["virtual_hosts"]
        for route in host["routes"]:
            route["route"].pop("retry_policy")  # with one, Envoy sends the body twice where trailers follow
        modes = filter_of(config)["processing_mode"]
        modes["request_body_mode"] = mode
        if mode == "BUFFERED":
            modes["response_body_mode"] = "STREAMED"

    async def scenario(rig: PickerRig) -> None:
        single = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
        for body, status, seen in (
            (single, 200, BODY),
            (b"%x\r\n%b\r\n" % (len(BODY), BODY), 200, BODY),
            (b"", 200 if mode == "FULL_DUPLEX_STREAMED" else 400, b""),
        ):
            client = await rig.client()
            await client.send(CHUNKED + body + b"0\r\nx-checksum: 1\r\n\r\n")
            assert (await client.answer()).status == status
            if status == 200:
                assert rig.replicas[0].requests[-1].body == seen

    with_envoy(scenario, change=change, replicas=1)


@needs_envoy
def test_behind_an_envoy_that_hides_heads_nobody_gets_in() -> None:
    """With ``request_header_mode: SKIP`` no key is seen: the body alone must not be picked for."""

    def change(config: Config) -> None:
        filter_of(config)["processing_mode"] |= {
            "request_header_mode": "SKIP",
            "request_body_mode": "BUFFERED",
            "response_body_mode": "NONE",
        }

    async def scenario(rig: PickerRig) -> None:
        assert (await rig.ask(CHAT, **A)).status == 500
        assert (await rig.ask(CHAT)).status == 500 and rig.seen() == [0]

    with_envoy(scenario, change=change, replicas=1, tenants=tenants())
