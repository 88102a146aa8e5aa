"""Made-up chats, recorded conversations, and text for block ids."""

import json
from collections import Counter
from pathlib import Path

import pytest

from sim.workload.chat_mix import APP_IDS, ChatMix, chat_trace
from sim.workload.prompt_text import PromptText
from sim.workload.sources import open_text_or_trace, open_trace
from sim.workload.text_sessions import read_text_sessions
from sim.workload.trace import TraceError


def test_chats_grow_and_share_system_prompts_unequally() -> None:
    trace = chat_trace(ChatMix(chats=500, apps=10, zipf=1.0), seed=4)
    assert trace == chat_trace(ChatMix(chats=500, apps=10, zipf=1.0), seed=4)
    assert trace != chat_trace(ChatMix(chats=500, apps=10, zipf=1.0), seed=5)
    firsts: Counter[int] = Counter()
    for before, request in zip((None, *trace.requests), trace.requests, strict=False):
        assert len(request.block_ids) == request.prompt_tokens // trace.block_tokens
        if before is not None and before.session == request.session:
            assert request.block_ids[: len(before.block_ids)] == before.block_ids
            assert request.prompt_tokens > before.prompt_tokens + before.output_tokens
        else:
            firsts[request.block_ids[0] // APP_IDS] += 1
    assert firsts[0] / firsts[4] == pytest.approx(5.0, rel=0.4)  # Zipf: first against fifth


def episode(*turns: tuple[str, str]) -> dict[str, object]:
    return {"traj": [{"role": role, "content": content} for role, content in turns]}


def test_every_recorded_answer_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    policy = "be polite. " * 60
    call = {"function": {"name": "book", "arguments": "{}"}}
    one = [
        {"role": "system", "content": policy},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "book", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "booked, as you asked for"},
    ]
    path.write_text(
        json.dumps([{"traj": one}, episode(("system", policy), ("user", "x"), ("assistant", "y"))])
    )
    trace, text = open_text_or_trace(str(path))
    assert text is not None and trace is text.trace
    assert [request.session for request in trace.requests] == ["episode 0", "episode 0", "episode 1"]
    assert [message["role"] for message in text.messages(1)] == ["system", "user", "assistant", "user"]
    assert text.messages(1)[2]["content"].startswith("tool call: ")
    assert text.messages(1)[3]["content"] == "tool result of book: done"
    first, second, other = (request.block_ids for request in trace.requests)
    assert second[: len(first)] == first and len(second) > len(first) > 5
    assert other[:5] == first[:5]  # the policy is shared
    assert trace.requests[1].output_tokens == len("booked, as you asked for") // 4
    assert open_trace(str(path), requests=2).requests == trace.requests[:2]
    short = text.up_to(trace.requests[0].prompt_tokens)
    assert len(short.trace.requests) == 2 and short.messages(1) == text.messages(2)
    with pytest.raises(TraceError, match="no prompt of 3 tokens or less"):
        text.up_to(3)


@pytest.mark.parametrize("content", ["[", "[1]", '[{"traj": [{"content": "x"}]}]', "[]", '[{"traj": []}]'])
def test_files_without_conversations_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "text.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"text\.json"):
        read_text_sessions(path)


def test_prompt_text_has_four_characters_a_token_and_repeats_only_what_the_trace_repeats() -> None:
    trace = open_trace("mooncake", requests=40)
    text = PromptText(trace.block_tokens, salt="s")
    blocks: dict[str, int] = {}
    for number, request in enumerate(trace.requests):
        prompt = text.prompt(request.block_ids, request.prompt_tokens, str(number))
        assert len(prompt) == 4 * request.prompt_tokens
        for place, block in enumerate(request.block_ids):
            piece = prompt[place * 2048 : (place + 1) * 2048]
            assert blocks.setdefault(piece, block) == block
    assert len(blocks) == len({block for request in trace.requests for block in request.block_ids})


def test_another_salt_shares_no_block() -> None:
    one, other = PromptText(512, salt="a"), PromptText(512, salt="b")
    assert one.prompt([1], 600, "x") == PromptText(512, salt="a").prompt([1], 600, "x")
    assert one.prompt([1], 600, "x")[:64] != other.prompt([1], 600, "x")[:64]
    assert one.prompt([1], 600, "x")[2048:] != one.prompt([1], 600, "y")[2048:]


def test_prompts_are_scaled_and_never_empty() -> None:
    text = PromptText(512, salt="a", characters_per_token=1.0, scale=1 / 64)
    assert len(text.prompt([1, 2], 1100, "x")) == 17
    assert text.prompt([], 1, "x")
