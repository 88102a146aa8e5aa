"""When requests are sent."""

import json
import random
from importlib.resources import files

import pytest

from sim.workload.arrivals import plan_arrivals
from sim.workload.chat_mix import ChatMix, chat_trace
from sim.workload.sources import open_trace
from tests.sim.traces import timed


def benchmark_times(rows: list[dict[str, int]], seed: int, rate: float) -> list[tuple[float, int]]:
    """As the project's HTTP routing benchmark spreads Mooncake's tied timestamps: (seconds, row)."""
    rng = random.Random(seed)
    times = sorted({row["timestamp"] for row in rows})
    following = dict(zip(times, [*times[1:], times[-1] + 3000], strict=True))
    spread = sorted(
        (row["timestamp"] + rng.random() * (following[row["timestamp"]] - row["timestamp"]), number)
        for number, row in enumerate(rows)
    )
    return [((time - spread[0][0]) / 1e3 / rate, number) for time, number in spread]


def test_ties_are_spread_as_in_the_http_benchmark() -> None:
    text = (files("sim.workload") / "data" / "mooncake_conversation_1000.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    expected = benchmark_times(rows, seed=5, rate=2.5)
    plan = plan_arrivals(open_trace("mooncake"), rate=2.5, seed=5)
    assert [arrival.at_s for arrival in plan] == pytest.approx([time for time, _ in expected])
    assert [arrival.request.prompt_tokens for arrival in plan] == [
        rows[k]["input_length"] for _, k in expected
    ]


def test_times_without_ties_stay_as_they_are() -> None:
    plan = plan_arrivals(timed([(500, 10, 1, ()), (1500, 10, 1, ()), (1600, 10, 1, ())]), rate=2.0)
    assert [arrival.at_s for arrival in plan] == [0.0, 0.5, 0.55]


def test_sessions_start_apart_and_turns_follow() -> None:
    trace = chat_trace(ChatMix(chats=300), seed=2)
    plan = plan_arrivals(trace, rate=4.0, seed=9)
    starts = [arrival.at_s for arrival in plan if arrival.at_s is not None]
    assert len(starts) == 300 and starts == sorted(starts)
    assert 300 / starts[-1] == pytest.approx(4.0, rel=0.15)
    for position, arrival in enumerate(plan):
        if arrival.next_turn is not None:
            assert arrival.next_turn == position + 1
            assert plan[position + 1].at_s is None
            assert plan[position + 1].request.session == arrival.request.session
            assert plan[position + 1].think_s == (plan[position + 1].request.think_ms or 0.0) / 1e3
    assert plan == plan_arrivals(trace, rate=4.0, seed=9)


def test_pauses_are_drawn_where_the_trace_tells_none() -> None:
    trace = open_trace("chats", seed=1)
    bare = type(trace)(
        trace.name,
        trace.block_tokens,
        tuple(type(r)(r.prompt_tokens, 1, r.block_ids, session=r.session) for r in trace.requests),
    )
    pauses = [a.think_s for a in plan_arrivals(bare, seed=1, mean_think_s=3.0) if a.at_s is None]
    assert sum(pauses) / len(pauses) == pytest.approx(3.0, rel=0.1)
    assert all(a.think_s == 0.0 for a in plan_arrivals(bare, seed=1, mean_think_s=0.0))
