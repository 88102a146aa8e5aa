"""A replica process of the chaos run: right answers, at times broken in one of many ways.

``python -m tests.chaos.faulty_replica --port P --faults 0.1 --seed 1``
"""

import argparse
import asyncio
import json
import random
from collections.abc import Callable

import uvloop

from tests.chaos.answers import right_body, right_events
from tests.fakes.fake_replica import (
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    FakeReplica,
    Hang,
    Plan,
    Reset,
    SeenRequest,
    Send,
    Step,
    Wait,
    chunk,
    head,
    sized,
)

ERROR = b'{"error":{"message":"chaos","type":"server_error","code":null,"param":null}}'
LONGEST_PAUSE_S = 1.5


class Faults:
    """Makes the plan for each request."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._share = share
        self._rng = rng
        self._menu: list[Callable[[list[bytes]], Plan]] = [
            self._reset_at_once,
            self._closed_at_once,
            self._reset_on_the_way,
            self._closed_on_the_way,
            self._cut_inside,
            self._garbage_head,
            self._garbage_on_the_way,
            self._silent,
            self._silent_on_the_way,
            self._ended_early,
            self._refused,
            self._slow,
        ]

    def plan(self, request: SeenRequest) -> Plan:
        """The plan for ``request``."""
        body = json.loads(request.body)
        prompt, stream = body["messages"][0]["content"], body["stream"]
        pieces = self._pieces(prompt, stream=stream)
        if self._rng.random() < self._share:
            return self._rng.choice(self._menu)(pieces)
        return [self._pause(0.05), *(Send(piece) for piece in pieces)]

    @staticmethod
    def _pieces(prompt: str, *, stream: bool) -> list[bytes]:
        if stream:
            return [STREAM_HEAD, *(chunk(event) for event in right_events(prompt)), LAST_CHUNK]
        whole = sized(right_body(prompt, stream=False))
        return [whole[:200], whole[200:]]

    def _pause(self, longest_s: float) -> Step:
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(self._rng.random() * longest_s, gate.set)
        return Wait(gate)

    def _some(self, pieces: list[bytes]) -> list[Step]:
        return [Send(piece) for piece in pieces[: self._rng.randrange(1, len(pieces))]]

    def _reset_at_once(self, pieces: list[bytes]) -> Plan:
        return [Reset()]

    def _closed_at_once(self, pieces: list[bytes]) -> Plan:
        return [Close()]

    def _reset_on_the_way(self, pieces: list[bytes]) -> Plan:
        return [*self._some(pieces), Reset()]

    def _closed_on_the_way(self, pieces: list[bytes]) -> Plan:
        return [*self._some(pieces), Close()]

    def _cut_inside(self, pieces: list[bytes]) -> Plan:
        whole = b"".join(pieces)
        return [Send(whole[: self._rng.randrange(1, len(whole))]), Close()]

    def _garbage_head(self, pieces: list[bytes]) -> Plan:
        return [Send(self._rng.randbytes(60) + b"\r\n\r\n")]

    def _garbage_on_the_way(self, pieces: list[bytes]) -> Plan:
        """Where a chunk's size should be. In a body with a length nobody could tell it from the answer."""
        if pieces[0] is not STREAM_HEAD:
            return self._cut_inside(pieces)
        return [*self._some(pieces), Send(b"\xff\xfe garbage\r\n"), Close()]

    def _silent(self, pieces: list[bytes]) -> Plan:
        return [Hang()]

    def _silent_on_the_way(self, pieces: list[bytes]) -> Plan:
        return [*self._some(pieces), Hang()]

    def _ended_early(self, pieces: list[bytes]) -> Plan:
        """In good order, but before the end: the framing is complete, the stream in it is not."""
        if pieces[0] is not STREAM_HEAD:
            return [Send(pieces[0]), Close()]
        return [*(Send(piece) for piece in pieces[: self._rng.randrange(2, 6)]), Send(LAST_CHUNK)]

    def _refused(self, pieces: list[bytes]) -> Plan:
        status = self._rng.choice([429, 500, 502, 503])
        if self._rng.random() < 0.3:
            return [Send(head(status, "No", content_length="500") + ERROR), Reset()]
        return [Send(sized(ERROR, status, "No", retry_after="1"))]

    def _slow(self, pieces: list[bytes]) -> Plan:
        steps: list[Step] = []
        for piece in pieces:
            steps += [self._pause(LONGEST_PAUSE_S), Send(piece)]
        return steps


async def serve(port: int, faults: Faults) -> None:
    """Answer on ``port`` until killed."""
    replica = FakeReplica(default=faults.plan, port=port)
    await replica.start()
    await asyncio.Event().wait()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--faults", type=float, default=0.1, help="share of requests (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    uvloop.run(serve(args.port, Faults(args.faults, random.Random(args.seed))))


if __name__ == "__main__":
    main()
