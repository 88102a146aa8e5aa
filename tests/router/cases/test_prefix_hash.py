"""Bug cases of the category prefix-hash correctness that no test of the hashing itself proves."""

import json
import random
from typing import Any

import pytest

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthState
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import MAX_BLOCKS, Prompt, read_prompt
from router.routing.replica_state import ReplicaSpec
from tests.fakes.fake_replica import Send, sized
from tests.fakes.proxy_rig import Rig, with_rig
from tests.router.closed_loop import make_fleet, prompt

REFUSAL = b'{"error":{"message":"illegal prompt","type":"BadRequestError","code":400,"param":"prompt"}}'
LONG = "once upon a time " * 400
IDS = list(range(3_000))
ALIKE = {"text": [LONG, [LONG]], "two texts": [[LONG, LONG]], "ids": [IDS, [IDS]], "two of ids": [[IDS, IDS]]}
LEGAL = [*(form for forms in ALIKE.values() for form in forms), "", []]
ILLEGAL: list[Any] = [[1, "a", [2]], [-1, -2], {"a": 1}, None, 7, [10**40], [[["deep"]]]]


@pytest.mark.parametrize("kind", ["predicted_finish", "prefix_affinity", "bounded_hash", "round_robin"])
def test_B024_every_form_of_a_completion_prompt_reaches_a_replica(kind: str) -> None:
    """Legal ones are answered, illegal ones get the replica's own 400; nothing is refused by us."""

    async def scenario(rig: Rig) -> None:
        for form in LEGAL:
            assert (await rig.ask({"model": "m", "prompt": form}, "/v1/completions")).status == 200
        for replica in rig.replicas:
            replica.default = [Send(sized(REFUSAL, 400, "Bad Request"))]
        for form in ILLEGAL:
            answer = await rig.ask({"model": "m", "prompt": form}, "/v1/completions")
            assert (answer.status, answer.body) == (400, REFUSAL)
        assert all(replica.health.state is HealthState.HEALTHY for replica in rig.fleet.replicas)

    with_rig(scenario, replicas=2, policy={"kind": kind})


@pytest.mark.parametrize("name", list(ALIKE))
def test_B024_the_same_prompt_goes_where_it_went_in_whatever_form(name: str) -> None:
    """Several prompts in one request are one key: all of them, in order."""

    async def scenario(rig: Rig) -> None:
        homes = set()
        for form in ALIKE[name] * 3:
            answer = await rig.ask({"model": "m", "prompt": form}, "/v1/completions")
            homes.add(answer.field("x-warmroute-replica"))
        assert len(homes) == 1

    with_rig(scenario, replicas=4, policy={"kind": "bounded_hash"}, expose_routing=True)


USER = {"role": "user", "content": "x " * 400}
TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MESSAGES: dict[str, Any] = {
    "text parts": [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}],
    "text and image": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}],
    "a tool call without content": [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}],
    "no content at all": [USER, {"role": "assistant", "tool_calls": [TOOL_CALL]}],
    "a refusal": [USER, {"role": "assistant", "content": None, "refusal": "no"}],
    "names": [{"role": "user", "name": "ann", "content": "hi"}],
    "a developer": [{"role": "developer", "content": "be brief"}, USER],
    "none": [],
    "not a list": {"role": "user"},
    "a string": "hi",
    "nulls and numbers": [None, 7, [], "x", {"role": 7, "content": 7}, {"content": [None, 1, {"text": 3}]}],
}


@pytest.mark.parametrize("kind", ["predicted_finish", "bounded_hash"])
@pytest.mark.parametrize("name", list(MESSAGES))
def test_B025_no_shape_of_messages_is_an_error_of_the_routers(name: str, kind: str) -> None:
    async def scenario(rig: Rig) -> None:
        for stream in (False, True):
            body = json.dumps({"model": "m", "messages": MESSAGES[name], "stream": stream}).encode()
            assert (await rig.ask(body)).status == 200
        assert sum(len(replica.requests) for replica in rig.replicas) == 2
        assert rig.counters.errors == {}

    with_rig(scenario, replicas=2, policy={"kind": kind})


@pytest.mark.parametrize("kind", ["predicted_finish", "prefix_affinity"])
def test_B081_a_block_counts_only_behind_its_own_prefix(kind: str) -> None:
    """r0 holds X, r1 holds Y; the prompt Y + X is warm on r1 alone, and by Y alone."""
    fleet = make_fleet(2, kind)
    for tried, name in (((1,), "X"), ((0,), "Y")):
        asked = prompt((name, 1_600))
        fleet.finished(fleet.sent(asked, fleet.decide(asked, 0.0, tried=tried), 0.0), 0.0)
    decision = fleet.decide(prompt(("Y", 1_600), ("X", 1_600)), 10.0)
    assert (decision.replica, decision.matched_tokens) == (1, 1_600)
    _, rows, _ = fleet.explain(prompt(("Y", 1_600), ("X", 1_600)), 10.0)
    assert [row.matched_tokens for row in rows] == [0, 1_600]


def test_B128_the_index_is_bounded_whatever_comes() -> None:
    """Ten thousand unique prompts of 30,000 tokens: never more than the replicas' capacity is believed."""
    capacity = 200_000
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(2)],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(default_capacity_tokens=capacity),
        rng=random.Random(2),
    )
    rng = random.Random(3)
    most = 0
    for number in range(10_000):
        keys = [rng.getrandbits(64) for _ in range(60)]
        asked = Prompt(keys=keys, units=30_000 * 4)
        fleet.finished(fleet.sent(asked, fleet.decide(asked, number * 1.0), number * 1.0), number + 0.5)
        ratio = fleet.token_ratio.tokens_per_unit
        assert all(fleet.index.held(replica) * ratio <= capacity for replica in range(2))
        most = max(most, fleet.index.nodes())
    assert most < 2 * 60 * (capacity // 10_000)
    fleet.index.check_invariants()


def test_B128_a_prompt_of_any_size_has_a_bounded_number_of_blocks() -> None:
    body = b'{"prompt":"' + b"word " * 4_000_000 + b'"}'
    assert len(read_prompt(body).keys) <= MAX_BLOCKS
