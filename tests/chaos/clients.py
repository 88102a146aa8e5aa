"""Clients of the chaos run: each request has one outcome, and whether it may be that is decided here."""

import asyncio
import json
import random
from collections import Counter
from enum import StrEnum

from tests.chaos.answers import request_body, right_body
from tests.fakes.raw_client import RawAnswer, RawClient

NO_OUTCOME_AFTER_S = 60.0
THINK_S = 0.4
SHARED_HEAD = "You are one of many. " * 40


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    RIGHT = "whole and right"
    REFUSED = "an error with its status"
    BROKEN = "openly broken, right so far"
    LEFT = "the client left"
    WRONG = "WRONG: passed off as an answer"
    NONE = "NO OUTCOME"


VIOLATIONS = frozenset({Outcome.WRONG, Outcome.NONE})


class Report:
    """Outcomes counted, and the first few violations in words."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.statuses: Counter[int] = Counter()
        self.violations: list[str] = []

    def add(self, outcome: Outcome, detail: str = "") -> None:
        """One request is over."""
        self.outcomes[outcome] += 1
        if outcome in VIOLATIONS and len(self.violations) < 20:
            self.violations.append(f"{outcome}: {detail}")


def judge(answer: RawAnswer, prompt: str, *, stream: bool) -> tuple[Outcome, str]:
    """What ``answer`` is worth."""
    right = right_body(prompt, stream=stream)
    shown = f"status {answer.status}, whole {answer.whole}, {answer.body[:120]!r}…{answer.body[-200:]!r}"
    if answer.status >= 400:
        if not answer.whole:
            return Outcome.BROKEN, ""
        try:
            return (Outcome.REFUSED, "") if "error" in json.loads(answer.body) else (Outcome.WRONG, shown)
        except ValueError:
            return Outcome.WRONG, shown
    if answer.status != 200:
        return Outcome.WRONG, shown
    if answer.whole:
        return (Outcome.RIGHT, "") if answer.body == right else (Outcome.WRONG, shown)
    so_far, error, _ = answer.body.partition(b'data: {"error"')
    honest = right.startswith(so_far) and (stream or not error)
    return (Outcome.BROKEN, "") if honest else (Outcome.WRONG, shown)


async def client(number: int, address: str, report: Report, rng: random.Random, stop: asyncio.Event) -> None:
    """One client: request after request, mostly on one connection, until ``stop``."""
    connection: RawClient | None = None
    turn = 0
    while not stop.is_set():
        turn += 1
        prompt = f"{SHARED_HEAD if rng.random() < 0.5 else ''}client {number} turn {turn} " * rng.randrange(
            1, 20
        )
        stream = rng.random() < 0.7
        try:
            if connection is None:
                connection = await RawClient.connect(address)
                connection.limit_s = NO_OUTCOME_AFTER_S
            await connection.post(request_body(prompt, stream=stream))
            if rng.random() < 0.05:
                await asyncio.sleep(rng.random() * 0.2)
                connection.leave()
                connection = None
                report.add(Outcome.LEFT)
                continue
            answer = await connection.answer()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, AssertionError, ValueError) as error:
            malformed = isinstance(error, AssertionError | ValueError)
            report.add(Outcome.WRONG if malformed else Outcome.NONE, f"{type(error).__name__}: {error}")
            if connection is not None:
                connection.leave()
                connection = None
            continue
        report.statuses[answer.status] += 1
        report.add(*judge(answer, prompt, stream=stream))
        if not answer.whole or answer.field("connection") == "close":
            connection.leave()
            connection = None
        await asyncio.sleep(rng.expovariate(1.0 / THINK_S))
    if connection is not None:
        connection.leave()
