"""Playing a script, and what is made of its records: figures, table, sentences, views."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from sim.demo.conversation_script import Conversation
from sim.demo.figures import DemoFigures, demo_figures, ideal_cached_share
from sim.demo.play_script import Message, RequestRecord, play
from sim.demo.report import explanation, result_table
from sim.demo.run_board import ReplicaBoard, RunBoard
from sim.demo.views import LiveView, PlainView, make_view
from sim.replay_client import Answer

REPLICAS = ("replica-1", "replica-2")
TALK = Conversation("talk-1", "talk", "Be brief.", 0.0, ("One?", "Two?", "Three?"), (0.0, 0.0, 0.0), False)


def answer(
    text: str = "Yes.",
    *,
    ttft_s: float = 0.5,
    prompt: int = 100,
    cached: int = 0,
    replica: str = "replica-1",
    reason: str = "warm",
    error: str | None = None,
) -> Answer:
    return Answer(
        ttft_s=None if error else ttft_s,
        e2e_s=ttft_s + 1.0,
        error=error,
        text=text,
        prompt_tokens=prompt,
        output_tokens=11,
        cached_tokens=cached,
        replica=replica,
        reason=reason,
        matched_tokens=cached,
    )


def record(number: int, given: Answer, *, burst: bool = False, says: str = "Hello") -> RequestRecord:
    messages: tuple[Message, ...] = ({"role": "system", "content": "S"}, {"role": "user", "content": says})
    return RequestRecord(f"talk-{number}", 1, burst, float(number), messages, given)


def figures_of(policy: str, *answers: Answer) -> DemoFigures:
    return demo_figures(policy, [record(k, given) for k, given in enumerate(answers)], REPLICAS, 0.002)


def test_each_turn_carries_the_whole_history() -> None:
    asked: list[list[Message]] = []

    async def ask(messages: Sequence[Message]) -> Answer:
        asked.append(list(messages))
        return answer(f"Answer {len(asked)}.")

    seen: list[RequestRecord] = []
    records = asyncio.run(play([TALK], 1.0, ask, seen.append))
    assert records == seen
    assert [r.turn for r in records] == [1, 2, 3]
    assert [[m["content"] for m in messages] for messages in asked] == [
        ["Be brief.", "One?"],
        ["Be brief.", "One?", "Answer 1.", "Two?"],
        ["Be brief.", "One?", "Answer 1.", "Two?", "Answer 2.", "Three?"],
    ]
    assert [m["role"] for m in asked[2]] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [list(r.messages) for r in records] == asked  # later turns did not change earlier records


def test_an_error_ends_its_conversation_and_no_other() -> None:
    async def ask(messages: Sequence[Message]) -> Answer:
        if messages[0]["content"] == "Broken." and len(messages) == 4:
            return answer(error="status 502")
        return answer()

    broken = replace(TALK, name="talk-2", system="Broken.")
    records = asyncio.run(play([TALK, broken], 1.0, ask, lambda _: None))
    assert sorted((r.conversation, r.turn) for r in records) == [
        ("talk-1", 1), ("talk-1", 2), ("talk-1", 3), ("talk-2", 1), ("talk-2", 2),
    ]  # fmt: skip
    assert [r.answer.error for r in records if r.answer.error] == ["status 502"]


def test_figures_count_what_was_reported() -> None:
    made = demo_figures(
        "predicted_finish",
        [
            record(0, answer(prompt=100, cached=0, ttft_s=0.4)),
            record(1, answer(prompt=100, cached=80, ttft_s=0.2), burst=True),
            record(2, answer(prompt=200, cached=100, ttft_s=0.6, replica="replica-2", reason="spill")),
            record(3, answer(error="truncated")),
        ],
        REPLICAS,
        0.002,
    )
    result = made.result
    assert (result.requests, result.errors, result.spills) == (4, 1, 1)
    assert (made.prompt_tokens, made.cached_tokens) == (400, 180)
    assert result.cached_share == pytest.approx(0.45)
    assert made.saved_prefill_ms == pytest.approx(180 * 2.0)
    assert made.burst_ttft_p50_s == 0.2
    assert result.ttft_s.mean == pytest.approx(0.4)
    # replica-1 computed 100 + 20 tokens, replica-2 100: the busier one has 120 of a mean of 110.
    assert result.max_over_mean_work == pytest.approx(120 / 110)
    assert result.tpot_ms.p50 == pytest.approx(100.0)
    assert made.json_object()["cached_share"] == 0.45


def test_the_ideal_counts_earlier_prompts_and_answers() -> None:
    shared = "x" * 160
    first = record(0, answer(text="y" * 64), says=shared)
    again = record(1, answer(), says=shared)
    other = record(2, answer(), says="z" * 160)
    only_first = ideal_cached_share([first])
    assert only_first == 0.0
    with_again = ideal_cached_share([first, again])
    assert with_again is not None and 0.4 < with_again < 0.5  # all but the last block of the second half
    with_other = ideal_cached_share([first, again, other])
    assert with_other is not None and 0.28 < with_other < 0.4
    next_turn = replace(
        first,
        messages=(
            *first.messages,
            {"role": "assistant", "content": "y" * 64},
            {"role": "user", "content": "?"},
        ),
    )
    continued = ideal_cached_share([first, next_turn])
    assert continued is not None and continued > with_again  # the answer's text was cached, too


def test_the_sentences_follow_the_numbers() -> None:
    slow = figures_of("round_robin", *(answer(cached=20, ttft_s=1.0) for _ in range(4)))
    fast = figures_of("predicted_finish", *(answer(cached=90, ttft_s=0.25) for _ in range(4)))
    better = " ".join(explanation([slow, fast], 0.002))
    assert "predicted_finish found 90.0%" in better
    assert "round_robin 20.0%" in better
    assert "280 prompt tokens fewer (40 instead of 320)" in better
    assert "250 ms instead of 1,000 ms (4.0 times shorter)" in better
    worse = " ".join(explanation([fast, slow], 0.002))
    assert "280 prompt tokens more (320 instead of 40)" in worse
    assert "(4.0 times longer)" in worse
    alike = " ".join(explanation([slow, slow], 0.002))
    assert "about the same" in alike
    assert explanation([slow], 0.002) == []
    spilled = figures_of("predicted_finish", answer(reason="spill"), answer())
    assert any(sentence.startswith("One request left") for sentence in explanation([slow, spilled], 0.002))
    failed = figures_of("predicted_finish", answer(error="status 502"))
    assert "nothing to compare" in explanation([slow, failed], 0.002)[0]


def test_the_table_has_a_row_per_policy() -> None:
    out = io.StringIO()
    runs = [figures_of("round_robin", answer(cached=25)), figures_of("predicted_finish", answer(cached=75))]
    Console(file=out, width=160).print(result_table(runs))
    text = out.getvalue()
    assert "round_robin" in text and "25.0%" in text
    assert "predicted_finish" in text and "75.0%" in text and "150" in text


def board() -> RunBoard:
    return RunBoard("predicted_finish", 3, 0.002, {name: ReplicaBoard() for name in REPLICAS})


def test_the_board_adds_up_what_replicas_did() -> None:
    made = board()
    made.request_done(record(0, answer(prompt=100, cached=50)))
    made.request_done(record(1, answer(prompt=100, cached=0, replica="replica-2", reason="spill")))
    made.request_done(record(2, answer(error="timed out")))
    made.fleet_seen(
        {
            "replicas": [
                {
                    "name": "replica-2",
                    "queued": 2,
                    "decoding": 1,
                    "wait_ms": 340.0,
                    "index": {"tokens": 900},
                }
            ]
        },
        elapsed_s=9.0,
    )
    assert (made.done, made.errors, made.spills, made.elapsed_s) == (3, 1, 1, 9.0)
    assert made.replicas["replica-1"].hit_share == 0.5
    assert made.replicas["replica-2"].queued == 2
    assert made.hit_share == 0.25
    assert made.total_saved_ms == pytest.approx(100.0)


def test_without_a_terminal_there_is_one_line_per_request() -> None:
    out = io.StringIO()
    view = make_view(Console(file=out, width=200))
    assert isinstance(view, PlainView)
    made = board()
    with view:
        view.say("starting [3] replicas")
        made.request_done(good := record(0, answer(prompt=100, cached=50)))
        view.changed(made, good)
        view.changed(made)
        made.request_done(bad := record(1, answer(error="status 502")))
        view.changed(made, bad)
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting [3] replicas"
    assert len(lines) == 6
    assert "replica-1 warm (matched 50): 50 of 100 tokens cached, saves 100 ms, TTFT 500 ms" in lines[1]
    assert lines[2].startswith("    user: ") and lines[3].startswith("    reply: ")
    assert "FAILED, status 502" in lines[4]
    assert lines[5].startswith("    user: ")  # nothing was replied


def test_on_a_terminal_the_picture_shows_replicas_and_decisions() -> None:
    out = io.StringIO()
    view = make_view(Console(file=out, width=140, height=50, force_terminal=True))
    assert isinstance(view, LiveView)
    made = board()
    with view:
        view.say("hello")
        made.request_done(done := record(0, answer(prompt=100, cached=50, reason="spill")))
        view.changed(made, done)
    text = out.getvalue()
    for expected in ("hello", "predicted_finish", "replica-2", "talk-0 #1", "spill", " 100 ", " 50 ", "1/3"):
        assert expected in text
