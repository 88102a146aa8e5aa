"""One client request in two steps, and all that breaks on the way: every step ends once."""

import asyncio
import json
import random

import pytest

from tests.fakes.fake_replica import (
    Close,
    Hang,
    Plan,
    Reset,
    SeenRequest,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.two_pools import (
    DECODE,
    LLMD,
    LONG,
    OURS,
    PARAMS,
    PREFILL,
    STREAM,
    VLLM,
    answerers,
    sent,
    vllm_prefill,
)


@pytest.mark.parametrize(
    "plan",
    [
        [Close()],
        [Reset()],
        [Send(b"SSH-2.0\r\n\r\n")],
        [Send(sized(b"{}", 500, "No"))],
        [Send(sized(b"{}", 429, "No"))],
        [Send(sized(b"{}", 400, "No"))],
        [Send(sized(completion())[:-9]), Close()],
        [Send(head(transfer_encoding="chunked") + chunk(completion()) + b"zz\r\n"), Close()],
        [Send(head(content_length=str(8 << 20)) + bytes(5 << 20)), Hang()],
    ],
    ids=["closed", "reset", "garbage", "500", "429", "400", "cut", "bad chunks", "endless"],
)
def test_what_the_prefill_pool_does_not_compute_the_decode_pool_does(plan: Plan) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = plan
        answer = await rig.ask(LONG)
        assert answer.status == 200 and answer.body == completion()
        (second,) = answerers(rig)
        assert sent(second) == LONG
        assert (rig.counters.handoffs, rig.counters.failed_handoffs) == (0, 1)

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_another_prefill_replica_is_tried_first() -> None:
    async def scenario(rig: Rig) -> None:
        for one in rig.replicas[:2]:
            one.plans.append([Close()])
        answer = await rig.ask(LONG)
        assert answer.status == 200
        computed = [one for one in rig.replicas[:2] if one.requests]
        assert len(computed) == 2, "both were asked, both failed"
        assert (rig.counters.retries, rig.counters.failed_handoffs) == (1, 1)
        assert (await rig.ask(LONG | {"user": "again"})).status == 200

    with_rig(scenario, each=[PREFILL, PREFILL, DECODE], policy={"kind": "predicted_finish"})


def test_nobody_left_to_answer_is_said() -> None:
    async def scenario(rig: Rig) -> None:
        rig.drain(1)
        rig.drain(2)
        answer = await rig.ask(LONG)
        assert answer.status == 503 and not rig.replica.requests

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_the_decode_pool_leaves_while_the_prompt_is_computed() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        asked = asyncio.create_task(rig.ask(LONG))
        await until(lambda: rig.replica.answering == 1)
        rig.drain(1)
        rig.drain(2)
        gate.set()
        answer = await asked
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "no_replica"

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("step", [1, 2])
def test_the_client_leaves_in_either_step(step: int) -> None:
    async def scenario(rig: Rig) -> None:
        if step == 1:
            rig.replica.default = [Hang()]
        else:
            for one in rig.replicas[1:]:
                one.default = [Hang()]
        client = await rig.client()
        await client.post(STREAM)
        waiting = rig.replicas[:1] if step == 1 else rig.replicas[1:]
        await until(lambda: any(one.answering for one in waiting))
        assert rig.booked()["in_flight"] == 1 and rig.booked()["queued"] == 1
        client.leave()
        await until(lambda: any(one.aborted for one in waiting))
        assert not any(rig.booked().values())
        assert rig.counters.client_disconnects == 1
        if step == 1:
            assert not answerers(rig)

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


def test_a_prefill_that_says_nothing_is_given_up_and_computed_elsewhere() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        answer = await rig.ask(LONG)
        assert answer.status == 200
        assert rig.replica.aborted == 1 and rig.counters.failed_handoffs == 1

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"}, timeouts={"first_byte_s": 0.2})


def test_the_answer_fails_after_its_first_byte_and_is_not_begun_again() -> None:
    async def scenario(rig: Rig) -> None:
        for one in rig.replicas[1:]:
            one.default = [Send(sized(completion())[:-5]), Reset()]
        answer = await rig.ask(LONG)
        assert not answer.whole
        assert len(rig.replica.requests) == 1 and len(answerers(rig)) == 1

    with_rig(scenario, each=OURS, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("end", ["client leaves", "closed", "500", "nobody"])
def test_a_sidecars_two_bookings_end_together(end: str) -> None:
    async def scenario(rig: Rig) -> None:
        plan: Plan = {"closed": [Close()], "500": [Send(sized(b"{}", 500, "No"))]}.get(end, [Hang()])
        for one in rig.replicas[1:]:
            one.plans.append(plan)
        if end == "nobody":
            rig.drain(1)
            rig.drain(2)
            assert (await rig.ask(LONG)).status == 503
        elif end == "client leaves":
            client = await rig.client()
            await client.post(LONG)
            await until(lambda: any(one.answering for one in rig.replicas[1:]))
            client.leave()
            await until(lambda: any(one.aborted for one in rig.replicas[1:]))
        else:
            await rig.ask(LONG)
            tried = [request for one in rig.replicas[1:] for request in one.requests]
            named = [request.field("x-prefiller-host-port") is not None for request in tried]
            assert len(named) > 1 and named.count(True) == 1, "the next one computes"
        assert not any(rig.booked().values())

    with_rig(scenario, each=LLMD, policy={"kind": "predicted_finish"})


def test_vllms_parameters_are_sent_again_where_the_request_was_never_seen() -> None:
    """The replica closed an idle connection as the request came."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = vllm_prefill
        rig.replicas[1].close_idle = True
        assert (await rig.ask(CHAT)).status == 200
        assert (await rig.ask(LONG)).status == 200
        assert sent(rig.replicas[1], -1)["kv_transfer_params"] == PARAMS

    with_rig(scenario, each=VLLM, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("pull", ["warmroute", "vllm", "llm-d"])
def test_whatever_breaks_in_either_step_every_request_ends_once(pull: str) -> None:
    """Sixty requests, a third of all steps broken in some way, clients that leave: nothing stays booked."""
    rng = random.Random(pull)

    def unsteady(seen: SeenRequest) -> Plan:
        healthy: Plan = [Send(sized(completion(prompt=10_000)))]
        if json.loads(seen.body)["stream"]:
            healthy = [Send(stream(delta("hel"), delta(None, finish="stop"), usage_event(10_000, 2, 4)))]
        elif b"do_remote_decode" in seen.body:
            healthy = vllm_prefill(seen)
        faults: list[Plan] = [
            [Close()],
            [Reset()],
            [Send(b"HTTP/1.1 200 OK\r\n"), Close()],
            [Send(sized(b"{}", 500, "No"))],
            [Send(sized(b"{}", 429, "No", retry_after="1"))],
            [Send(sized(b"{}", 400, "No"))],
            [Send(sized(completion())[:-9]), Reset()],
        ]
        return rng.choice(faults) if rng.random() < 0.33 else healthy

    async def scenario(rig: Rig) -> None:
        for one in rig.replicas:
            one.default = unsteady

        async def asks(number: int) -> int | None:
            text = f"{number} " + "long " * rng.choice((10, 4_000, 8_000))
            body = LONG | {"messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
            if number % 7 == 0:
                client = await rig.client()
                await client.post(body)
                client.leave()
                return None
            answer = await rig.ask(body)
            assert answer.status in (200, 400, 429, 500, 502, 503), answer.status
            return answer.status

        statuses = []
        for first in range(0, 60, 12):
            statuses += await asyncio.gather(*(asks(number) for number in range(first, first + 12)))
        assert statuses.count(200) > 20
        await until(lambda: not any(rig.booked().values()))
        assert rig.counters.handoffs > 5

    # The fakes compute in no time, and the router learns it.
    ways = {"kv_source": "10.0.0.1:8400"} if pull == "warmroute" else {"kv_pull": pull}
    decode = {"role": "decode", "kv_pull": pull, "transfer": {"fixed_ms": 0, "us_per_token": 0.001}}
    each = [{"role": "prefill"} | ways] * 2 + [decode] * 3
    with_rig(
        scenario,
        each=each,
        policy={"kind": "predicted_finish"},
        health={"failures_to_eject": 1_000},
        retries={"attempts": 4, "budget_floor": 1_000},
    )
