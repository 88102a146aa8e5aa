"""The last decisions and the prefixes their prompts share, as the admin port tells them."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.recent import KEPT, Recent
from router.proxy.shared_prefixes import PARTS_BELOW, SharedPrefixes
from router.routing.decision import Decision, Reason
from router.routing.prompt_blocks import Prompt
from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Close, Hang, Send, chunk, delta
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router

STREAM = [Send(STREAM_HEAD + chunk(delta("hi")) + chunk(DONE_EVENT) + LAST_CHUNK)]


async def told(rig: RouterRig, query: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await rig.admin(f"/decisions{query}")).json()["decisions"]
    return rows


def chat(system: str, says: str) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": says}],
    }


def test_each_decision_has_its_reason_figures_and_outcome() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].default = rig.replicas[1].default = STREAM
        await rig.ask({**CHAT_STREAM, **chat("word " * 2_000, "one"), "stream": True}, x_request_id="one")
        await rig.ask({**chat("word " * 2_000, "two"), "stream": True}, x_request_id="two")
        two, one = await told(rig)
        assert (one["request_id"], one["status"], one["reason"]) == ("one", 200, "cold")
        assert (two["request_id"], two["reason"], two["replica"]) == ("two", "warm", one["replica"])
        assert one["saved_ms"] == one["matched_tokens"] == 0 < one["prefill_ms"]
        assert two["matched_tokens"] > 1_000 and two["saved_ms"] > two["prefill_ms"] > 0
        assert 0.0 < two["ttft_ms"] < 10_000 and 0.0 <= two["age_s"] <= one["age_s"]
        assert two["number"] == one["number"] + 1 and two["model"] == "m"

    with_router(scenario, replicas=2, policy={"kind": "predicted_finish"})


def test_a_request_that_is_tried_again_has_two_and_one_that_runs_no_status() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].plans.append([Close()])
        await rig.ask(CHAT)
        second, first = await told(rig)
        assert first["retried"] and first["status"] is None and first["replica"] == "r0"
        assert not second["retried"] and (second["status"], second["reason"]) == (200, "retry")
        assert first["request_id"] == second["request_id"]
        rig.replicas[0].default = rig.replicas[1].default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.router.counters.in_flight == 1)
        assert (await told(rig))[0]["status"] is None
        client.leave()
        await until(lambda: rig.router.counters.in_flight == 0)
        assert (await told(rig))[0]["status"] == 499

    with_router(scenario, replicas=2)


def test_a_long_name_of_a_model_is_not_kept() -> None:
    """Where replicas do not tell their models any name is routed, and as long as a body."""
    recent, decision = Recent(), Decision(0, Reason.COLD)
    for model in ("m" * 256, "x" * 1_000_000):
        recent.decided(1.0, b"id", "r0", decision, Prompt(keys=[1], units=300, model=model))
    assert [row.prompt.model for row in recent.rows] == ["m" * 256, None]
    assert [list(row.prompt.keys) for row in recent.rows] == [[1], []]


def test_it_is_bounded_and_limits_are_checked() -> None:
    async def scenario(rig: RouterRig) -> None:
        client = await rig.client()
        for _ in range(KEPT + 10):
            await client.post(CHAT)
            assert (await client.answer()).status == 200
        rows = await told(rig)
        assert [row["number"] for row in rows] == list(range(KEPT + 10, 10, -1))
        assert [row["number"] for row in await told(rig, "?limit=3")] == [266, 265, 264]
        for wrong in ("0", "257", "-1", "x", "1.5"):
            assert (await rig.admin(f"/decisions?limit={wrong}")).status == 400

    with_router(scenario)


def test_prefixes_that_many_ask_for_are_told_and_masked() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].default = rig.replicas[1].default = STREAM
        secret = "the secret recipe " * 400
        for number in range(6):
            await rig.ask(chat(secret, f"question {number} " * 50))
        await rig.ask(chat("something else " * 400, "hello"))
        answer = await rig.admin("/prefixes")
        shown = answer.json()
        assert shown["requests"] == 7
        (prefix,) = shown["prefixes"]
        assert prefix["requests"] == 6 and prefix["model"] == "m" and prefix["prefill_ms"] > 0
        assert 0.8 < prefix["tokens"] / (len(secret) / 4) < 1.1
        homes = {row["replica"] for row in await told(rig) if row["matched_tokens"]}
        assert homes <= set(prefix["replicas"])
        keys = {key for row in rig.router.data_plane.service.recent.rows for key in row.prompt.keys}
        assert b"recipe" not in answer.body and len(prefix["prefix"]) == 8
        assert not any(f"{key:x}" in prefix["prefix"] or prefix["prefix"] in f"{key:x}" for key in keys)

    with_router(scenario, replicas=2, policy={"kind": "predicted_finish"})


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 999))
def test_a_shared_prefix_is_counted_as_often_as_prompts_begin_so(cuts: list[int], seed: int) -> None:
    """Against counting one by one."""
    rng = random.Random(seed)
    chains = [[(depth, rng.random() < 0.2) for depth in range(cut)] for cut in cuts]
    keys = [[hash(tuple(chain[: depth + 1])) for depth in range(len(chain))] for chain in chains]
    shared = SharedPrefixes()
    for chain in keys:
        shared.add(Prompt(keys=chain, units=1_000))
    found = shared.largest(1_000)
    for prefix in found:
        begin_so = [chain for chain in keys if prefix.key in chain]
        assert prefix.prompts == len(begin_so) > 1
        assert {chain.index(prefix.key) + 1 for chain in begin_so} == {prefix.blocks}
        goes_on = [chain[prefix.blocks] for chain in begin_so if len(chain) > prefix.blocks]
        assert all(goes_on.count(key) < PARTS_BELOW * prefix.prompts for key in goes_on)
    work = [prefix.prompts * prefix.blocks for prefix in found]
    assert work == sorted(work, reverse=True)
