"""Random bytes, random cuts, random faults: no crash, no hang, no leak, no wrong answer."""

import asyncio
import contextlib
import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.proxy.answer import Answer
from router.proxy.body_framing import ChunkedBody, FramingError
from router.proxy.request_head import ClientError
from router.proxy.request_reader import RequestReader
from router.proxy.response_head import GarbageError, read_response_head
from router.proxy.stream_watch import StreamWatch
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Hang,
    Plan,
    Reset,
    Send,
    SendByteByByte,
    chunk,
    completion,
    delta,
    event,
    head,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, with_rig
from tests.fakes.raw_client import RawAnswer

FAST = settings(max_examples=150, deadline=None)


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` in pieces, cut at ``cuts`` (taken modulo its length)."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)
bodies = st.binary(max_size=60)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """One well-formed request and its body."""
    body = draw(bodies)
    name = draw(st.sampled_from([b"Content-Length", b"content-length", b"CONTENT-LENGTH"]))
    extra = draw(st.sampled_from([b"", b"X-A: b\r\n", b"Accept: */*\r\nX-Length: 5\r\n"]))
    start = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n" + extra
    if draw(st.booleans()):
        return start + name + b": %d\r\n\r\n" % len(body) + body, body
    size = draw(st.integers(1, 20))
    extension = draw(st.sampled_from([b"", b";a", b' ; a="b"']))
    chunks = b"".join(
        b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        for piece in (body[at : at + size] for at in range(0, len(body), size))
    )
    trailers = draw(st.sampled_from([b"", b"X-T: 1\r\n", b"A: 1\r\nB:\r\n"]))
    return start + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"000\r\n" + trailers + b"\r\n", body


@FAST
@given(st.lists(requests(), min_size=1, max_size=5), cuts)
def test_requests_do_not_depend_on_how_they_are_cut(
    sent: list[tuple[bytes, bytes]], places: list[int]
) -> None:
    reader = RequestReader()
    got = []
    for piece in _cut(b"".join(raw for raw, _ in sent), places):
        reader.feed(piece)
        while (request := reader.next_request(header_limit=1000, body_limit=1000)) is not None:
            got.append(request[1])
    assert got == [body for _, body in sent]
    assert reader.buffer == b""


@FAST
@given(requests(), st.data(), cuts)
def test_a_damaged_request_is_read_or_refused_the_same_however_cut(
    sent: tuple[bytes, bytes], data: st.DataObject, places: list[int]
) -> None:
    raw = bytearray(sent[0])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))

    def outcome(pieces: list[bytes]) -> object:
        reader = RequestReader()
        got = []
        try:
            for piece in pieces:
                reader.feed(piece)
                while (request := reader.next_request(header_limit=1000, body_limit=1000)) is not None:
                    got.append((request[0].target, request[1]))
        except ClientError as error:
            return got, error.error.status
        return got, None

    whole, pieces = outcome([bytes(raw)]), outcome(_cut(bytes(raw), places))
    assert whole == pieces


@FAST
@given(st.binary(max_size=300), cuts)
def test_any_bytes_are_read_or_refused(raw: bytes, places: list[int]) -> None:
    reader = RequestReader()
    try:
        for piece in _cut(raw, places):
            reader.feed(piece)
            while reader.next_request(header_limit=100, body_limit=100) is not None:
                pass
    except ClientError as error:
        assert error.error.status in (400, 413, 431, 501, 505)


@FAST
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), cuts, st.binary(max_size=10))
def test_chunks_against_a_naive_model(pieces: list[bytes], places: list[int], extra: bytes) -> None:
    raw = b"".join(chunk(piece) for piece in pieces) + LAST_CHUNK
    framing, payload, used = ChunkedBody(), list[bytes](), 0
    for piece in _cut(raw + extra, places):
        if framing.done:
            break
        used += framing.take(piece, 0, payload)
    assert framing.done
    assert used == len(raw)
    assert b"".join(payload) == b"".join(pieces)


@FAST
@given(st.binary(max_size=200), cuts)
def test_any_bytes_are_chunks_or_not(raw: bytes, places: list[int]) -> None:
    def outcome(pieces: list[bytes]) -> object:
        framing, payload = ChunkedBody(), list[bytes]()
        try:
            for piece in pieces:
                if framing.done:
                    break
                framing.take(piece, 0, payload)
        except FramingError:
            return "bad"
        return framing.done, b"".join(payload)

    assert outcome([raw]) == outcome(_cut(raw, places))


EVENTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                delta("", role="assistant"),
                delta("a \u20ac"),
                delta(None, finish="stop"),
                usage_event(9, 3, 4),
                DONE_EVENT,
                b": comment\n\n",
                event([1]),
                b"data: {\n\n",
            ]
        ),
        st.binary(max_size=30),
    ),
    max_size=8,
)


@FAST
@given(EVENTS, cuts)
def test_what_is_read_in_a_stream_does_not_depend_on_cuts(events: list[bytes], places: list[int]) -> None:
    payload = b"".join(events)

    def outcome(pieces: list[bytes]) -> object:
        watch = StreamWatch()
        for piece in pieces:
            watch.pieces.append(piece)
            watch.grew(len(piece))
        return watch.first_token, watch.usage(), watch.ended_properly, watch.between_events

    assert outcome([payload]) == outcome(_cut(payload, places))


@FAST
@given(EVENTS, cuts, st.booleans(), st.sampled_from(["chunks", "length", "close"]))
def test_an_answer_does_not_depend_on_cuts(
    events: list[bytes], places: list[int], http10: bool, framing: str
) -> None:
    """What the client gets is the payload, in its framing, and done exactly at the end."""
    events = [*events, b"\n", DONE_EVENT]
    payload = b"".join(events)
    if framing == "chunks":
        response = read_response_head(STREAM_HEAD)
        raw = b"".join(chunk(one) for one in events if one) + LAST_CHUNK
    elif framing == "length":
        response = read_response_head(
            head(content_type="text/event-stream", content_length=str(len(payload)))
        )
        raw = payload
    else:
        response = read_response_head(head(content_type="text/event-stream"))
        raw = payload
    answer = Answer(response, method=b"POST", path=b"/v1/chat/completions", http10=http10)
    out = b""
    for piece in _cut(raw, places):
        assert not answer.done
        out += answer.take(piece)
    if framing == "close":
        assert not answer.done
        out += answer.closed()
    assert answer.done
    if (framing == "chunks" and not http10) or (framing == "close" and not http10):
        got: list[bytes] = []
        reader = ChunkedBody()
        assert reader.take(out, 0, got) == len(out)
        assert reader.done
        out = b"".join(got)
    assert out == payload


@FAST
@given(st.binary(max_size=200))
def test_any_bytes_are_an_answers_head_or_garbage(raw: bytes) -> None:
    with contextlib.suppress(GarbageError):
        read_response_head(b"HTTP/1.1 200 " + raw.replace(b"\r\n\r\n", b"") + b"\r\n\r\n")


# --- everything together ---------------------------------------------------------------------------

WHOLE_JSON = completion("right")
WHOLE_EVENTS = [delta("", role="assistant"), delta("right"), delta(None, finish="stop")]
WHOLE_STREAM = b"".join([*WHOLE_EVENTS, DONE_EVENT])


def _plans(rng: random.Random, streamed: bool) -> Plan:
    """One of the fault menu, or a good answer in one of its forms."""
    good = stream(*WHOLE_EVENTS) if streamed else sized(WHOLE_JSON)
    cut = rng.randrange(1, len(good))
    return rng.choice(
        [
            [Send(good)],
            [Send(good)],
            [SendByteByByte(good)],
            [Send(good[:cut]), Send(good[cut:])],
            [Send(good[:cut]), Close()],
            [Send(good[:cut]), Reset()],
            [Send(good[:cut]), Hang()],
            [Send(good), Close()],
            [Send(good + b"extra")],
            [Hang()],
            [Close()],
            [Reset()],
            [Send(b"garbage\r\n\r\n")],
            [Send(sized(b'{"error":{}}', 400, "Bad"))],
            [Send(sized(b'{"error":{}}', 429, "Busy", retry_after="1"))],
            [Send(sized(b'{"error":{}}', 500, "No")), Close()],
            [Send(head(503, "No", content_length="99") + b"x"), Reset()],
            [Send(b"HTTP/1.1 100 Continue\r\n\r\n" + good)],
            [Send(head(204, "Nothing"))],
        ]
    )


async def _one_client(rig: Rig, rng: random.Random, outcomes: list[int]) -> None:
    client = await rig.client()
    for _ in range(rng.randrange(1, 4)):
        streamed = rng.random() < 0.5
        await client.post(CHAT_STREAM if streamed else CHAT)
        deed = rng.randrange(6)
        if deed == 0:
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            client.leave()
            return
        if deed == 1:
            await client.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 50\r\n\r\n{")
        answer = await client.answer()
        outcomes.append(answer.status)
        _check(answer, streamed)
        if not answer.whole or answer.field("connection") == "close":
            client.leave()
            return
        if deed == 1:
            client.leave()
            return
    client.leave()


def _check(answer: RawAnswer, streamed: bool) -> None:
    """Whole and right, or openly not."""
    if answer.status == 200 and answer.whole:
        assert answer.body == (WHOLE_STREAM if streamed else WHOLE_JSON)
    elif answer.status == 200:
        assert b"[DONE]" not in answer.body or not streamed or WHOLE_STREAM.startswith(answer.body)
    else:
        assert answer.status in (204, 400, 429, 500, 502, 503, 504)
        if answer.whole and answer.status != 204:
            assert "error" in json.loads(answer.body)


@pytest.mark.parametrize("policy", ["round_robin", "predicted_finish"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_random_clients_and_random_faults(policy: str, seed: int) -> None:
    """Every request has an outcome, none a wrong one; the rig checks that all is zero afterwards."""
    rng = random.Random(seed)
    outcomes: list[int] = []

    async def scenario(rig: Rig) -> None:
        def plan(request: Any) -> Plan:
            return _plans(rng, b'"stream": true' in request.body)

        for replica in rig.replicas:
            replica.default = plan
        await asyncio.gather(*(_one_client(rig, rng, outcomes) for _ in range(8)))

    rig = with_rig(
        scenario,
        replicas=2,
        stop_s=0.5,
        policy={"kind": policy},
        timeouts={"first_byte_s": 0.1, "idle_s": 0.1, "client_header_s": 0.2},
        health={"failures_to_eject": 1000},
    )
    ended = sum(rig.counters.requests.values())
    assert ended >= len(outcomes)
