"""What is kept of a stream that is passed on: its end, enough of it, and never much more."""

import random

import pytest

from router.proxy.stream_watch import TAIL_BYTES, StreamWatch, has_content


@pytest.mark.parametrize("longest", [1, 200, TAIL_BYTES, 40 * TAIL_BYTES])
def test_the_end_is_kept_whatever_pieces_it_came_in(longest: int) -> None:
    rng = random.Random(longest)
    watch, payload = StreamWatch(), b""
    while len(payload) < 6 * TAIL_BYTES + 3 * longest:
        piece = rng.randbytes(rng.randint(1, longest))
        payload += piece
        watch.pieces.append(piece)
        watch.grew(len(piece) + rng.randint(0, 8))  # with its framing
        assert payload.endswith(watch.tail)
        assert min(len(payload), TAIL_BYTES) <= len(watch.tail) <= 2 * TAIL_BYTES


@pytest.mark.parametrize(
    ("event", "content"),
    [
        (b'{"choices":[{"delta":{"content":"x"}}]}', True),
        (b'{"choices":[{"delta":{"content":""}}]}', False),
        (b'{"choices":[{"delta":{"content":""}},{"delta":{"content":"x"}}]}', True),
        (b'{"choices":[{"delta":{"content":null,"reasoning":"x"}}]}', True),
        (b'{"choices":[{"delta":{"role":"\\"delta\\":{\\"content\\":\\"x"}}]}', False),
        (b'{"choices":[{"delta":{"content":', False),
    ],
)
def test_an_event_has_content_if_its_delta_does(event: bytes, content: bool) -> None:
    assert has_content(event) is content
