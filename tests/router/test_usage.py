"""The usage at an answer's end: read byte by byte where it is as engines write it, parsed where it is not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.proxy.stream_watch import JsonWatch, StreamWatch
from router.proxy.usage import read_usage, usage_at_end
from router.routing.in_flight import Usage

NAMES = st.sampled_from(
    (
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "cached_tokens",
        "prompt_tokens_details",
        "input_tokens",
        "output_tokens",
        "input_tokens_details",
        "x",
    )
)
PLAIN = st.none() | st.integers(0, 1 << 41)
OTHER = (
    st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("a1:, ", max_size=4)
    | st.lists(st.integers(), max_size=2)
)
OBJECTS = st.recursive(PLAIN | OTHER, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=6)


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (
            b'"usage": {"prompt_tokens":3, "prompt_tokens_details":{"x": {}, "cached_tokens": 2}}',
            (3, None, 2),
        ),
        (b'"usage":{"prompt_tokens":3},"timings":{"cache_n":1,"prompt_n":2}}', (3, None, 1)),
        (b'"timings":{"cache_n":1,"prompt_n":2},"usage":{"prompt_tokens":3}}', (3, None, 1)),
        (
            b'"usage":{"prompt_tokens":30,"total_tokens":34,"completion_tokens":4,"prompt_tokens_details":null}}',
            (30, 4, None),
        ),
        (
            b'"usage": {"prompt_tokens": 30, "completion_tokens": 4, '
            b'"prompt_tokens_details": {"cached_tokens": 16}}',
            (30, 4, 16),
        ),
        (
            b'"usage":{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":5}}',
            (7, 2, 5),
        ),
        (b'"usage":{"cached_tokens":5,"prompt_tokens":9,"details":{"prompt_tokens":1}}', (9, None, None)),
        (b'"usage":{"prompt_tokens":9.5,"completion_tokens":12345678901234567890}', (None, None, None)),
        (b'"usage":["prompt_tokens",5]}', None),
        (b'"usage":null}', None),
        (b'"usage":{"prompt_tokens":3', None),
        (b'"usage":{"a":{"b":{' + b"}" * 2, None),
        (b'"usage":' + b"{" * 5000 + b"}" * 5000, None),
    ],
)
def test_a_usage_is_read_where_it_is_whole(
    tail: bytes, told: tuple[int | None, int | None, int | None] | None
) -> None:
    assert usage_at_end(tail) == (None if told is None else Usage(*told))


@given(
    usage=st.dictionaries(NAMES, PLAIN | st.dictionaries(NAMES, PLAIN, max_size=3))
    | st.dictionaries(NAMES, OBJECTS),
    separators=st.sampled_from(((",", ":"), (", ", ": "), (" , ", " : "))),
    indent=st.sampled_from((None, 1)),
)
def test_it_is_read_as_if_it_were_parsed(
    usage: dict[str, Any], separators: tuple[str, str], indent: int | None
) -> None:
    body = json.dumps({"choices": [], "usage": usage}, separators=separators, indent=indent)
    assert usage_at_end(body.encode()) == read_usage(usage)


def test_a_usage_that_an_event_has_cut_into_data_lines_is_read() -> None:
    watch = StreamWatch()
    watch.pieces.append(b'data: {"usage":\ndata: {"prompt_tokens":\ndata: 7}}\n\ndata: [DONE]\n\n')
    assert watch.usage() == Usage(7, None, None) and watch.ended_properly
    assert JsonWatch().usage() is None


def test_a_streams_usage_is_found_behind_what_follows_it_and_before_small_pieces() -> None:
    watch = StreamWatch()
    payload = b'data: {"x":"' + b"y" * 9_000 + b'"}\n\ndata: {"usage":{"prompt_tokens":7}}\n\n'
    payload += b": ping\n\n" * 100 + b"data: [DONE]\n\n"
    for at in range(0, len(payload), 50):
        watch.pieces.append(payload[at : at + 50])
        watch.grew(50)
    assert watch.usage() == Usage(7, None, None)
