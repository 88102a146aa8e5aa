"""Bug cases of the category routing-quality."""

import asyncio
import random
from collections import Counter
from math import sin
from typing import Any

import pytest

from router.routing.in_flight import Usage
from router.routing.prompt_blocks import MAX_BLOCKS, read_prompt
from router.routing.replica_state import ReplicaSpec
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import RouterRig, with_router
from tests.router.closed_loop import ClosedLoop, make_fleet, max_over_mean, prompt

CACHE_AWARE = ["predicted_finish", "prefix_affinity"]


@pytest.mark.parametrize("kind", CACHE_AWARE)
def test_B030_a_shared_system_prompt_spreads_and_sessions_stay(kind: str) -> None:
    """1,000 strangers behind one system prompt, 64 at a time; then sessions of several turns."""
    loop = ClosedLoop(make_fleet(4, kind))
    strangers = iter(range(1_000))

    def stranger() -> None:
        number = next(strangers, None)
        if number is not None:
            loop.send(prompt(("system", 1_024), (f"user {number}", 208)))

    for _ in range(64):
        stranger()
    for _ in loop.answers():
        stranger()
    assert sum(loop.sent.values()) == 1_000
    assert max_over_mean(loop.sent, 4) <= 1.3

    homes: dict[int, int] = {}
    turns = Counter[int]()
    stayed = moved = 0

    def turn(session: int) -> None:
        nonlocal stayed, moved
        turns[session] += 1
        history = [(f"session {session} turn {number}", 320) for number in range(turns[session])]
        chosen = loop.send(prompt(("system", 1_024), *history), session)
        if session in homes:
            stayed, moved = stayed + (chosen == homes[session]), moved + (chosen != homes[session])
        homes[session] = chosen

    for session in range(64):
        turn(session)
    for tag in loop.answers():
        if turns[tag] < 6:  # type: ignore[index]
            turn(tag)  # type: ignore[arg-type]
    assert stayed / (stayed + moved) >= 0.9


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/embeddings": {"model": "m", "input": ["a", "b"]},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/anything/else": {"x": 1},
    "/v1/audio/transcriptions": {},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize("kind", ["least_loaded", "predicted_finish"])
def test_B041_load_counts_on_every_route(path: str, stream: bool, kind: str) -> None:
    """Eight requests that do not end are spread over four replicas, and the ledger says what they say."""

    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Hang()]
        body = ROUTES[path] | ({"stream": True} if stream else {})
        for count in range(1, 9):
            await (await rig.client()).post(body, path)
            await until(lambda count=count: sum(r.answering for r in rig.replicas) == count)  # type: ignore[misc]
            in_flight = [replica.in_flight for replica in rig.fleet.replicas]
            assert in_flight == [replica.answering for replica in rig.replicas]
        assert in_flight == [2, 2, 2, 2] if kind == "least_loaded" else min(in_flight) >= 1

    with_rig(scenario, replicas=4, policy={"kind": kind}, hold={"enabled": False})


def test_B054_streams_go_on_beside_huge_prompts() -> None:
    """Prompts of 8 MB come back to back; the work for each is bounded, and events pass between them."""
    body = b'{"model":"m","messages":[{"role":"user","content":"' + b"word " * 1_600_000 + b'"}]}'
    assert len(read_prompt(body).keys) <= MAX_BLOCKS

    async def scenario(rig: Rig) -> None:
        gates = [asyncio.Event() for _ in range(20)]
        steps: list[Any] = [Send(STREAM_HEAD)]
        for index, gate in enumerate(gates):
            steps += [Wait(gate), Send(chunk(delta(str(index))))]
        rig.replica.plans.append([*steps, Send(chunk(DONE_EVENT) + LAST_CHUNK)])
        streaming, posting = await rig.client(), await rig.client()
        await streaming.post(CHAT_STREAM)
        await streaming.head()
        for index, gate in enumerate(gates[:5]):
            await posting.post(body)
            gate.set()
            assert await streaming.chunk() == delta(str(index))
            assert (await posting.answer()).status == 200
        for gate in gates:
            gate.set()

    with_rig(scenario, policy={"kind": "predicted_finish"}, hold={"enabled": False})


def test_B062_a_session_whose_replica_died_moves_on_and_at_most_once_back() -> None:
    async def scenario(rig: Rig) -> None:
        async def turn() -> str:
            answer = await rig.ask(CHAT, x_session_id="s-1", connection="close")
            assert answer.status == 200
            return answer.field("x-warmroute-replica") or ""

        home = await turn()
        assert {await turn() for _ in range(5)} == {home}
        index = int(home[1:])
        await rig.replicas[index].kill()
        other = await turn()
        assert other != home
        assert {await turn() for _ in range(5)} == {other}  # pinned anew
        await rig.replicas[index].start()
        rig.fleet.probe_succeeded(index, rig.plane.service.clock() + 60.0)
        rig.fleet.replicas[index].health.request_succeeded()
        rig.fleet.replicas.changed()
        after = [await turn() for _ in range(10)]
        assert len(set(after)) == 1

    with_rig(scenario, replicas=3, policy={"kind": "session"}, expose_routing=True)


def test_B079_probes_and_a_reload_leave_the_load_as_it_is() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.admin("/drain/r1", "POST")
        rig.replicas[0].default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        for _ in range(50):
            await (await rig.client()).post(CHAT_STREAM)
        await until(lambda: rig.replicas[0].answering == 50)
        await rig.admin("/drain/r1", "DELETE")
        probes = len(rig.replicas[0].probes)
        await until(lambda: len(rig.replicas[0].probes) >= probes + 15)  # five rounds
        assert (await rig.admin("/reload", "POST")).status == 200
        state = (await rig.fleet())["r0"]
        assert state["queued"] + state["decoding"] == 50
        for _ in range(20):
            assert (await rig.ask(CHAT)).status == 200
        assert len(rig.replicas[1].requests) == 20

    with_router(scenario, replicas=2, policy={"kind": "least_loaded"})


@pytest.mark.parametrize("kind", CACHE_AWARE)
def test_B080_a_conversation_that_grows_from_nothing_is_pinned(kind: str) -> None:
    """There is no threshold below which a prompt is not recorded: what is worth a block is remembered."""
    loop = ClosedLoop(make_fleet(4, kind))
    chosen = []
    for tokens in range(64, 4_096, 64):
        chosen.append(loop.send(prompt(("conversation", tokens))))
        loop.drain()
        loop.now += 1.0
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("kind", CACHE_AWARE)
def test_B088_unseen_prompts_go_where_less_is_to_be_done(kind: str) -> None:
    """A knows little and has 50 long requests under way; B knows much and is idle."""
    fleet = make_fleet(2, kind)
    loop = ClosedLoop(fleet, decode_s=1_000.0)
    for number in range(300):
        known = prompt((f"known {number}", 640))
        fleet.finished(fleet.sent(known, fleet.decide(known, 0.0, tried=(0,)), 0.0), 0.0)
    for number in range(50):
        busy = prompt((f"busy {number}", 4_000))
        fleet.sent(busy, fleet.decide(busy, 0.0, tried=(1,)), 0.0)
    assert fleet.index.held(0) < fleet.index.held(1) or fleet.replicas[0].in_flight == 50
    for number in range(100):
        loop.send(prompt((f"unseen {number}", 320)))
    assert loop.sent[1] >= 80


def test_B104_idle_equals_share_and_a_known_prefix_goes_to_its_holder() -> None:
    loop = ClosedLoop(make_fleet(4))
    homes = {}
    for number in range(400):
        loop.now += 10.0
        homes[number] = loop.send(prompt((f"distinct {number}", 320)))
        loop.drain()
    assert all(80 <= loop.sent[replica] <= 120 for replica in range(4))
    for number in random.Random(1).sample(range(400), 50):
        loop.now += 10.0
        assert loop.send(prompt((f"distinct {number}", 320))) == homes[number]
        loop.drain()


def one_by_one(
    kind: str, seed: int, replicas: int = 2, slower: float = 1.0, requests: int = 400
) -> list[int]:
    """Strangers that want one token, each after the last, on a machine whose speed wanders.

    Requests by replica; the last replica is ``slower`` times slower.
    """
    fleet, rng = make_fleet(replicas, kind), random.Random(seed)
    sent, now = [0] * replicas, 0.0
    for number in range(requests):
        asked = prompt((f"stranger {number}", 360))
        asked.max_tokens = 1
        decision = fleet.decide(asked, now)
        flight = fleet.sent(asked, decision, now)
        seconds = 0.02 * rng.lognormvariate(0.0, 0.4) * (1.0 + 0.7 * abs(sin(now / 3.0)))
        now += seconds * (slower if decision.replica == replicas - 1 else 1.0)
        fleet.first_token(flight, now)
        fleet.finished(flight, now, Usage(360, 1, 0))
        sent[decision.replica] += 1
        now += 0.002
    return sent


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", CACHE_AWARE)
def test_B104_idle_equals_share_also_where_times_vary(kind: str, seed: int) -> None:
    assert min(one_by_one(kind, seed)) >= 100  # of 200


@pytest.mark.parametrize("kind", CACHE_AWARE)
def test_B104_a_slow_one_is_tried_now_and_then_and_no_more(kind: str) -> None:
    assert 4 <= one_by_one(kind, 1, slower=2.5)[1] <= 80


@pytest.mark.parametrize("field", [{}, {"x_session_id": ""}])
def test_B126_without_a_session_or_with_an_empty_one_the_load_decides(field: dict[str, str]) -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Hang()]
        for number in range(12):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number} " * 300}]}
            await (await rig.client()).post(body, **field)
            await until(lambda number=number: sum(r.answering for r in rig.replicas) == number + 1)  # type: ignore[misc]
        assert max(replica.answering for replica in rig.replicas) <= 5

    with_rig(scenario, replicas=3, policy={"kind": "session"}, hold={"enabled": False})


@pytest.mark.parametrize("system_tokens", [512, 2_048, 8_192])
@pytest.mark.parametrize("kind", ["predicted_finish", "prefix_affinity"])
def test_B133_new_replicas_get_their_share_and_are_not_flooded(kind: str, system_tokens: int) -> None:
    """Steady sessions on two replicas; two more join. Counted over the next requests."""
    fleet = make_fleet(2, kind)
    loop = ClosedLoop(fleet, decode_s=0.3)
    turns = Counter[int]()
    newest = 0

    def turn(session: int) -> None:
        turns[session] += 1
        history = [(f"session {session} turn {number}", 160) for number in range(turns[session])]
        loop.send(prompt(("system", system_tokens), *history), session)

    def next_turn(session: int) -> None:
        """Sessions of eight turns; then another one begins."""
        nonlocal newest
        if turns[session] == 8:
            newest += 1
            session = newest
        turn(session)

    for _ in range(48):
        newest += 1
        turn(newest)
    for answered, tag in enumerate(loop.answers(), 1):
        if answered == 600:
            for name in ("r2", "r3"):
                fleet.probe_succeeded(
                    fleet.replica_added(ReplicaSpec(name, f"http://{name}")).index, loop.now
                )
        if answered == 800:  # 200 requests to come into work
            loop.sent.clear()
        if answered < 1_600:
            next_turn(tag)  # type: ignore[arg-type]
    fair = sum(loop.sent.values()) / 4
    for replica in (2, 3):
        assert 0.6 * fair <= loop.sent[replica] <= 1.4 * fair


def test_B134_small_requests_keep_away_from_a_few_huge_ones() -> None:
    """Three requests of 96,000 tokens on A, thirty small ones on B to D: few requests, much work."""
    fleet = make_fleet(4)
    for number in range(3):
        huge = prompt((f"huge {number}", 96_000))
        fleet.sent(huge, fleet.decide(huge, 0.0, tried=(1, 2, 3)), 0.0)
    for number in range(30):
        small = prompt((f"small {number}", 320))
        fleet.sent(small, fleet.decide(small, 0.0, tried=(0,)), 0.0)
    loop = ClosedLoop(fleet)
    for number in range(30):
        loop.send(prompt((f"more {number}", 320)))
    assert loop.sent[0] == 0
    _, rows, _ = fleet.explain(prompt(("one more", 320)), 0.0)
    assert rows[0].total_s == max(row.total_s for row in rows)  # and explain says why


def test_B134_the_fallback_measure_counts_tokens_not_requests() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Hang()]
        long = {**CHAT, "messages": [{"role": "user", "content": "x" * 400_000}]}
        rig.drain(1)
        await (await rig.client()).post(long)
        await until(lambda: rig.replicas[0].answering == 1)
        rig.drain(1, on=False)
        gate = asyncio.Event()
        rig.replicas[1].default = [Wait(gate), Send(sized(completion()))]
        asks = [asyncio.create_task(rig.ask(CHAT)) for _ in range(5)]
        await until(lambda: rig.replicas[1].answering == 5)  # five requests there, one here
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*asks)} == {200}

    with_rig(scenario, replicas=2, policy={"kind": "least_loaded"})
