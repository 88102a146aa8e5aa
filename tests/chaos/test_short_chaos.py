"""A few seconds of the chaos run; ``make chaos`` is the long one."""

import argparse
import io
from pathlib import Path

import pytest
import uvloop
from rich.console import Console

from tests.chaos.answers import right_body
from tests.chaos.clients import Outcome, judge
from tests.chaos.run_chaos import run
from tests.fakes.raw_client import RawAnswer


@pytest.mark.parametrize("policy", ["predicted_finish", "round_robin"])
def test_no_request_without_an_outcome_and_none_a_wrong_one(policy: str, tmp_path: Path) -> None:
    args = argparse.Namespace(seconds=2.5, clients=50, faults=0.2, policy=policy, seed=7)
    said = io.StringIO()
    assert uvloop.run(run(tmp_path, args, Console(file=said, width=200))) == 0, said.getvalue()


WHOLE = right_body("p", stream=True)


@pytest.mark.parametrize(
    ("body", "whole", "outcome"),
    [
        (WHOLE, True, Outcome.RIGHT),
        (WHOLE, False, Outcome.BROKEN),
        (WHOLE[:100], True, Outcome.WRONG),
        (WHOLE[:100], False, Outcome.BROKEN),
        (WHOLE[:50] + b"x", False, Outcome.WRONG),
        (WHOLE.replace(b"assistant", b"assassins"), True, Outcome.WRONG),
        (b"", False, Outcome.BROKEN),
        (b"", True, Outcome.WRONG),
        (b'data: {"error":{}}\n\n', False, Outcome.BROKEN),
        (b'data: {"error":{}}\n\n', True, Outcome.WRONG),
    ],
)
def test_the_judge_can_tell(body: bytes, whole: bool, outcome: Outcome) -> None:
    answer = RawAnswer(200, "OK", [], body, whole)
    assert judge(answer, "p", stream=True)[0] is outcome
