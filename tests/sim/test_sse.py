"""Events out of bytes, however the bytes are cut."""

import pytest

from sim.sse import EventStream

STREAM = 'event: x\r\ndata: {"a": "é"}\r\n\r\n: comment\n\ndata:one\ndata: two\n\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a": "é"}'.encode(), b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_any_cut_gives_the_same_events(size: int) -> None:
    stream = EventStream()
    events = []
    for start in range(0, len(STREAM), size):
        events += stream.feed(STREAM[start : start + size])
    assert events == EVENTS


def test_an_unfinished_event_is_no_event() -> None:
    assert EventStream().feed(b"data: 1\n\ndata: 2\n") == [b"1"]
