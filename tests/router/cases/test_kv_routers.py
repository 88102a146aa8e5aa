"""Black-box cases K01 to K21: defects that routers which look at KV caches had (kv_routers, section 6.5).

Those that other tests prove carry their id there; ``test_every_case`` sees that none is left out.
"""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from replica.contract.load_report import LoadReport
from router.routing.block_naming import BlockNaming
from router.routing.decision import NoReplica
from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt, UniformLayout, read_prompt, root_key, text_prompt
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure
from sim.simulate import SimulationSettings, simulate
from sim.simulated_replica import ReplicaSettings
from sim.workload.rag_mix import RagMix, rag_trace
from sim.workload.strangers import strangers_trace
from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Hang, Send, chunk, delta
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.router.closed_loop import BLOCK, ClosedLoop, make_fleet, max_over_mean, prompt


def send(fleet: Fleet, asked: Prompt, now: float, tried: tuple[int, ...] = ()) -> InFlight:
    """Decide and send, at once."""
    return fleet.sent(asked, fleet.decide(asked, now, tried=tried), now)


def test_K01_a_replica_that_comes_and_goes_with_requests_in_flight_ends_at_zero() -> None:
    fleet = make_fleet(2)
    flights = [send(fleet, prompt((f"user {number}", 320)), 0.0) for number in range(24)]
    rng = random.Random(1)
    for number, flight in enumerate(flights):
        now = 0.1 * (number + 1)
        fleet.probe_failed(number % 2, now, refused=True)
        fleet.probe_succeeded(number % 2, now + 100.0)
        end = rng.choice(["finished", "failed", "cancelled", "twice"])
        if end in ("finished", "twice"):
            fleet.first_token(flight, now)
            fleet.finished(flight, now)
        if end in ("failed", "twice"):
            fleet.failed(flight, now, Failure.CONNECT)
        if end == "cancelled":
            fleet.cancelled(flight, now)
        for replica in fleet.replicas:
            assert min(replica.ledger.queued, replica.ledger.decoding, replica.ledger.outstanding_tokens) >= 0
    for replica in fleet.replicas:
        ledger = replica.ledger
        assert (ledger.queued, ledger.decoding, ledger.in_flight, ledger.outstanding_tokens) == (0, 0, 0, 0)
        assert ledger.backlog_s(1e6) == 0.0


def test_K02_a_request_of_three_hours_stays_counted() -> None:
    fleet = make_fleet(2)
    flight = send(fleet, prompt(("long", 3_200)), 0.0)
    fleet.first_token(flight, 1.0)
    for minute in range(180):
        fleet.tick(60.0 * minute)
        fleet.probe_succeeded(flight.replica.index, 60.0 * minute)
    assert (flight.replica.ledger.decoding, flight.replica.in_flight) == (1, 1)
    fleet.finished(flight, 10_800.0)
    assert flight.replica.in_flight == 0


@pytest.mark.parametrize("stream", [False, True], ids=["before the first byte", "in mid-stream"])
def test_K03_a_client_that_leaves_is_released_once(stream: bool) -> None:
    """The rig itself sees at its end that every counter is zero."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()] if stream else [Hang()]
        client = await rig.client()
        await client.post(CHAT_STREAM if stream else CHAT)
        await until(lambda: rig.replica.answering == 1)
        if stream:
            await client.head()
            assert await client.chunk()
        (replica,) = rig.fleet.replicas
        assert replica.in_flight == 1
        client.leave()
        await until(lambda: replica.in_flight == 0)
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a")) + chunk(DONE_EVENT) + LAST_CHUNK)]
        assert (await rig.ask(CHAT_STREAM)).status == 200

    with_rig(scenario, hold={"enabled": False})


@pytest.mark.parametrize("kind", ["predicted_finish", "prefix_affinity", "least_loaded"])
def test_K04_a_replica_without_a_load_signal_neither_wins_nor_loses(kind: str) -> None:
    loop = ClosedLoop(make_fleet(4, kind))
    strangers = iter(range(600))

    def stranger() -> None:
        if (number := next(strangers, None)) is not None:
            loop.send(prompt((f"user {number}", 640)))

    for _ in range(32):
        stranger()
    for answered, _ in enumerate(loop.answers()):
        if answered % 8 == 0:  # three of four tell of their load, the last one never does
            for replica in range(3):
                loop.fleet.load_reported(replica, LoadReport(running=8, waiting=0, kv_usage=0.5), loop.now)
        stranger()
    assert 0.75 * 150 <= loop.sent[3] <= 1.25 * 150


def test_K05_what_is_left_after_evictions_is_a_true_prefix() -> None:
    """Filled past its capacity: the match of every prompt is a prefix that a shorter prompt has, too."""
    fleet = make_fleet(1)
    fleet.load_reported(0, LoadReport(capacity_tokens=40 * BLOCK), 0.0)
    asked = [prompt((f"user {number}", 12 * BLOCK)) for number in range(5)]
    for number, one in enumerate(asked):
        fleet.finished(send(fleet, one, float(number)), number + 0.5)
    lengths = [fleet.index.match(one.keys)[0] for one in asked]
    assert 0 < lengths[1] < 12 and lengths[0] == 0 and lengths[2:] == [12, 12, 12], "the oldest tails left"
    assert fleet.index.match(asked[1].keys[: lengths[1]]) == [lengths[1]]
    assert fleet.index.match(asked[1].keys[lengths[1] :]) == [0], "nothing is known of its end alone"
    assert sum(lengths) * BLOCK == fleet.index.held(0) == 40 * BLOCK


def test_K06_a_prefix_in_use_outlives_newer_ones() -> None:
    fleet = make_fleet(1)
    fleet.load_reported(0, LoadReport(capacity_tokens=40 * BLOCK), 0.0)
    kept = prompt(("in use", 10 * BLOCK))
    for number in range(30):
        for one in (kept, prompt((f"user {number}", 10 * BLOCK))):
            fleet.finished(send(fleet, one, float(number)), number + 0.5)
        assert fleet.index.match(kept.keys) == [10]


@pytest.mark.parametrize("replicas", [4, 8])
def test_K07_sixteen_siblings_at_once_share_a_cold_prefix(replicas: int) -> None:
    """All in the same instant: few homes, and in each the prefix is computed by the first alone."""
    fleet = make_fleet(replicas)
    flights = [
        send(fleet, prompt(("document", 16_000), (f"question {number}", 64)), 0.0) for number in range(16)
    ]
    homes: dict[int, list[int]] = {}
    for flight in flights:
        homes.setdefault(flight.replica.index, []).append(flight.decision.matched_tokens)
    assert len(homes) <= -(-16 // replicas)
    for first, *others in homes.values():
        assert first == 0 and all(matched >= 16_000 - BLOCK for matched in others)


def test_K08_eight_routers_in_the_same_instant_do_not_all_take_one_replica() -> None:
    """Before they hear of each other; what they hear is booked (tests/state, over a real Redis)."""
    chosen = Counter[int]()
    for router in range(8):
        fleet = make_fleet(8)
        fleet.reconfigured(type(fleet.policy)(random.Random(router)), {}, fleet.settings)  # type: ignore[call-arg]
        chosen[send(fleet, prompt(("same for all", 3_200)), 0.0).replica.index] += 1
    assert len(chosen) >= 4 and max(chosen.values()) <= 3


def test_K10_old_metrics_on_the_only_replica_refuse_nobody() -> None:
    fleet = make_fleet(1)
    fleet.load_reported(0, LoadReport(running=256, waiting=1_000, kv_usage=1.0), 0.0)
    for number in range(50):  # no report since
        flight = send(fleet, prompt((f"user {number}", 320)), 86_400.0 + number)
        fleet.finished(flight, 86_400.5 + number)
    assert fleet.replicas[0].requests == 50


def test_K11_nobody_there_is_503_and_too_much_is_429_each_with_its_reason() -> None:
    async def empty(rig: Rig) -> None:
        rig.drain(0)
        answer = await rig.ask(CHAT)
        assert (answer.status, answer.error["code"]) == (503, "no_replica")

    async def saturated(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        waiting = [await rig.client() for _ in range(4)]
        for number, client in enumerate(waiting):
            await client.post(
                {**CHAT_STREAM, "messages": [{"role": "user", "content": f"{number} " * 40_000}]}
            )
        await until(lambda: rig.fleet.held >= 2)
        answer = await rig.ask({**CHAT, "messages": [{"role": "user", "content": "x " * 40_000}]})
        assert (answer.status, answer.error["code"]) == (429, "hold_full") and answer.field("retry-after")
        for client in waiting:
            client.leave()

    with_rig(empty)
    with_rig(saturated, policy={"kind": "predicted_finish"}, hold={"max_requests": 2})


def test_K15_without_sharing_it_is_as_good_as_least_loaded() -> None:
    results = simulate(
        strangers_trace(requests=1_200, seed=3),
        ["predicted_finish", "least_loaded"],
        replicas=8,
        rate=2.0,
        settings=SimulationSettings(),
    )
    ours, theirs = (result.e2e_s.mean for result in results)
    assert ours is not None and theirs is not None and ours < 1.02 * theirs


def test_K17_a_fixed_corpus_falls_apart_at_no_price_of_a_spill() -> None:
    """Hits change smoothly from one load to the next: no two states with a cliff between them."""
    trace = rag_trace(RagMix(sorted_passages=True), requests=900, seed=2)
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=100_000))
    shares = []
    for rate in (0.5, 0.7, 0.9, 1.1):
        (result,) = simulate(trace, ["predicted_finish"], replicas=8, rate=rate, settings=settings)
        assert result.cached_share is not None
        shares.append(result.cached_share)
    for one, next_one in pairwise(shares):
        assert next_one > 0.85 * one


@pytest.mark.parametrize("kind", ["predicted_finish", "least_loaded", "power_of_two", "round_robin"])
def test_K18_a_replica_that_joins_gets_its_share(kind: str) -> None:
    loop = ClosedLoop(make_fleet(3, kind))
    strangers = iter(range(900))

    def stranger() -> None:
        if (number := next(strangers, None)) is not None:
            loop.send(prompt(("system", 512), (f"user {number}", 320)))

    for _ in range(32):
        stranger()
    for answered, _ in enumerate(loop.answers()):
        if answered == 300:
            joined = loop.fleet.replica_added(ReplicaSpec("r3", "http://r3"))
            loop.fleet.probe_succeeded(joined.index, loop.now)
            loop.sent.clear()
        stranger()
    assert max_over_mean(loop.sent, 4) <= 1.5 and loop.sent[3] >= 0.7 * sum(loop.sent.values()) / 4


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_K19_a_partial_last_block_gives_no_credit(tokens: int) -> None:
    naming = BlockNaming("warmroute", 16)
    assert len(naming.keys(range(tokens))) == tokens // 16
    fleet = make_fleet(1)
    head = prompt(("head", 64 * BLOCK))
    fleet.finished(send(fleet, head, 0.0), 1.0)
    partial = Prompt(keys=head.keys[:2], units=2 * BLOCK + 7, layout=UniformLayout(BLOCK), stream=True)
    assert fleet.decide(partial, 2.0).matched_tokens == 2 * BLOCK


def test_K20_salts_adapters_and_models_share_nothing() -> None:
    words = {"messages": [{"role": "user", "content": "the same words " * 100}]}
    variants: list[dict[str, Any]] = [
        {"model": "m"},
        {"model": "other"},
        {"model": "m", "cache_salt": "a"},
        {"model": "m", "cache_salt": "b"},
    ]
    keys = [set(text_prompt({**words, **variant}).keys) for variant in variants]
    for number, one in enumerate(keys):
        assert one and all(one.isdisjoint(other) for other in keys[number + 1 :])
    assert len({root_key("m"), root_key("m", adapter="x"), root_key("m", salt="x")}) == 3
    assert not read_prompt(b"{}").keys


def test_K21_rejections_are_reported_beside_latency() -> None:
    """A simulated replica that dies shows as errors in the row, not as better latency."""
    fleet = make_fleet(1)
    fleet.drained(0, 0.0)
    with pytest.raises(NoReplica) as caught:
        fleet.decide(prompt(("user", 320)), 0.0)
    assert caught.value.why == "none_usable"

    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(CHAT)).status == 200
        rig.drain(0)
        assert (await rig.ask(CHAT)).status == 503
        assert rig.counters.requests == {("r0", 200): 1, ("", 503): 1}
        assert rig.counters.errors == {"no_replica": 1}
        assert sum(rig.counters.ttft_s.counts) + sum(rig.counters.first_byte_s.counts) <= 2, (
            "of answers alone"
        )

    with_rig(scenario)
