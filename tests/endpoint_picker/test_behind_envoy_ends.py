"""Behind a real Envoy: clients that leave, answers that break off, a picker that is down, many at once."""

import asyncio
import json

from tests.endpoint_picker.envoy_modes import HOLD, MODES, Change
from tests.fakes.envoy import PICKERS_HEALTHY, Config, PickerRig, filter_of, needs_envoy, with_envoy
from tests.fakes.fake_replica import (
    STREAM_HEAD,
    Close,
    Hang,
    Send,
    Wait,
    chunk,
    delta,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until

pytestmark = needs_envoy


# --- leaving --------------------------------------------------------------------------------------


@MODES
def test_a_client_that_leaves_stops_the_replica(change: Change) -> None:
    async def scenario(rig: PickerRig) -> None:
        replica = rig.replicas[0]
        for plan in ([Hang()], [Send(STREAM_HEAD + chunk(delta("hel"))), Hang()]):
            replica.plans.append(plan)
            client = await rig.client()
            await client.post(CHAT_STREAM)
            await until(lambda: replica.answering == 1)
            if len(plan) > 1:
                await client.head()
            client.leave()
            await until(lambda: not replica.answering and rig.rig.at_rest())
        assert replica.aborted == 2 and rig.counters.requests == {("r0", 499): 2}
        assert rig.counters.client_disconnects == 2

    with_envoy(scenario, change=change, replicas=1)


def test_a_client_that_leaves_before_its_turn_or_its_last_byte() -> None:
    async def scenario(rig: PickerRig) -> None:
        rig.replicas[0].default = [Hang()]
        long = {**CHAT_STREAM, "messages": [{"role": "user", "content": "long ago and far away " * 20_000}]}
        first, held, half = await rig.client(), await rig.client(), await rig.client()
        await first.post(long)
        await until(lambda: rig.seen() == [1])
        await held.post(long)
        await until(lambda: rig.rig.router.fleet.held == 1)
        await half.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: rig.counters.in_flight == 3)
        for client, left in ((held, 2), (half, 1), (first, 0)):
            client.leave()
            await until(lambda left=left: rig.counters.in_flight == left)
        assert rig.counters.requests == {("", 499): 2, ("r0", 499): 1} and rig.seen() == [1]

    with_envoy(scenario, **HOLD)


def test_an_answer_that_breaks_off_is_not_passed_for_whole() -> None:
    async def scenario(rig: PickerRig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].plans.append([Send(STREAM_HEAD + chunk(delta("hel"))), Wait(gate), Close()])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("hel")
        gate.set()
        assert await client.chunk() is None, "no last chunk"
        await until(lambda: not rig.counters.in_flight)
        rig.replicas[0].plans.append([Send(stream(delta("hel"), done=False))])
        assert (await rig.ask(CHAT_STREAM)).body == delta("hel")
        await until(lambda: not rig.counters.in_flight)
        assert rig.counters.broken_streams == 1, "the second: framed well, but without a mark of its end"

    with_envoy(scenario, replicas=1)


# --- without a picker -----------------------------------------------------------------------------


def test_a_picker_that_is_down_leaves_round_robin_where_that_is_wanted() -> None:
    def opened(config: Config) -> None:
        filter_of(config)["failure_mode_allow"] = True

    async def scenario(rig: PickerRig) -> None:
        await rig.rig.router.data_plane.stop(0.0)
        await rig.envoy.until(lambda page: page.endswith(": 0\n"), PICKERS_HEALTHY)
        for _ in range(4):
            assert (await rig.ask()).status == 200
        assert rig.seen() == [2, 2] and not rig.counters.requests

    with_envoy(scenario, change=opened)


def test_a_picker_that_is_down_closes_the_gateway() -> None:
    async def scenario(rig: PickerRig) -> None:
        await rig.rig.router.data_plane.stop(0.0)
        answers = [(await rig.ask()).status for _ in range(2)]
        await rig.envoy.until(lambda page: page.endswith(": 0\n"), PICKERS_HEALTHY)
        answers += [(await rig.ask()).status for _ in range(2)]
        assert answers == [503] * 4 and rig.seen() == [0, 0]

    with_envoy(scenario, keys={"public": ["right"]})


def test_many_at_once_leave_nothing_behind() -> None:
    async def scenario(rig: PickerRig) -> None:
        bodies = [{**(CHAT_STREAM if n % 2 else CHAT), "user": "u" * n * 997} for n in range(120)]
        answers = await asyncio.gather(*(rig.ask(body) for body in bodies))
        assert {answer.status for answer in answers} == {200} and sum(rig.seen()) == 120
        sent = sorted(len(one.body) for replica in rig.replicas for one in replica.requests)
        assert sent == sorted(len(json.dumps(body)) for body in bodies)
        await until(lambda: not rig.counters.in_flight)
        assert sum(rig.counters.requests.values()) == 120

    with_envoy(scenario, replicas=3)
