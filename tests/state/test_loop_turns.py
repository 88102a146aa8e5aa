"""A frozen Redis, and one that is back, keep no request from its turn.

How long turns take is measured by ``python -m tests.state.run_frozen_redis`` (goal: 5 ms). Here a turn may
be ten times that, so that a busy machine is not taken for a fault: whatever waits for Redis takes longer.
"""

import asyncio
import time

from tests.fakes.redis_server import RedisServer, needs_redis
from tests.state.loop_turns import turns_ms
from tests.state.members import Members, until, with_redis

pytestmark = needs_redis

LIMIT_MS = 50.0
TRIES = 3
"""A machine that is busy with other things can make one turn look long; a fault of ours makes all of them."""


def test_no_turn_waits_for_a_redis_that_is_frozen_or_back() -> None:
    longest: list[float] = []

    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        for name in range(500):
            one.end(one.send(name, blocks=72))
        for _ in range(TRIES):
            with turns_ms() as turns:
                server.freeze()
                sent = 0
                while not (one.report.state == two.report.state == "cut_off" and not two.report.peers):
                    for member in (one, two):
                        member.end(member.send(sent % 500, blocks=72))
                    sent += 1
                    await asyncio.sleep(0.003)
                back_at = time.monotonic()
                server.thaw()
                await until(lambda: one.report.state == two.report.state == "sharing")
            assert sent > 50 and time.monotonic() - back_at < 10.0
            longest.append(max(turns))
            if longest[-1] <= LIMIT_MS:
                break

    with_redis(scenario)
    assert min(longest) <= LIMIT_MS, longest
