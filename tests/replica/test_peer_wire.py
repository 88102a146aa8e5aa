"""Questions between replicas as bytes: what is written is read, and what makes no sense is refused."""

from dataclasses import replace
from typing import Any

import pytest

from replica.contract.block_hash import token_bytes
from replica.peers.peer_wire import (
    MAC_BYTES,
    QUESTION,
    PeerError,
    Question,
    key_of,
    question_sizes,
    read_question,
    written_question,
)

KEY, NONCE = key_of("between-us"), bytes(16)
ASKED = Question("any", "salt", None, 8_192, ((0, 2),), token_bytes(range(32)))


def passed_on(question: Question) -> Question:
    said = written_question(question, NONCE, KEY)
    head_bytes, _ = question_sizes(said[: QUESTION.size])
    return read_question(said[:-MAC_BYTES], head_bytes, said[-MAC_BYTES:], NONCE, KEY)


def test_a_question_is_read_as_it_was_asked() -> None:
    assert passed_on(ASKED) == ASKED and ASKED.places == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"salt": 7},
        {"adapter": ["a"]},
        {"salt": "\ud800"},
        {"block_bytes": 0},
        {"block_bytes": -1},
        {"ranges": ((0, 33),)},
        {"ranges": ((1, 2), (0, 1))},
        {"ranges": ((-1, 1),)},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_also_from_a_holder_of_the_secret(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        passed_on(replace(ASKED, **change))
