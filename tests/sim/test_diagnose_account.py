"""The account adds up to the token for any traffic, and agrees with the simulator's own figures."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.prompt_blocks import canonical_text
from sim.bounds import ideal_cached_share
from sim.diagnose.account import Cause
from sim.diagnose.capacity import need
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.masking import masked, snippet
from sim.diagnose.prefix_set import PrefixSet, common_prefix
from sim.diagnose.prompt_doc import prompt_doc
from sim.diagnose.request_log import LoggedRequest
from sim.diagnose.sample import open_sample, sample_of_log
from sim.reuse_distance import reuse_distances
from sim.simulate import simulate
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings

SENTENCES = st.sampled_from(
    [
        "You are an agent.\n",
        "Today is 2026-11-29.\n",
        "Today is 2026-11-30 at 10:31.\n",
        "Ask user 17.\n",
        "Ask user 18.\n",
        "Passage one is about seats and bags and flights.\n\n",
        "Passage two is about refunds and rules and cases.\n\n",
        "short ",
        "é\ud800",
    ]
)
TEXTS = st.lists(SENTENCES, max_size=8).map("".join)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "assistant"]),
    TEXTS,
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, min_size=1, max_size=6)},
    optional={
        "model": st.sampled_from(["m", "n"]),
        "cache_salt": st.sampled_from(["a", "b"]),
        "tools": st.permutations([{"name": "x"}, {"name": "y"}]),
        "documents": st.permutations([{"text": "one"}, {"text": "two"}]),
    },
)


@st.composite
def logs(draw: st.DrawFn) -> list[LoggedRequest]:
    """Rows with words, all or none of them with token ids, some with what a replica reported."""
    rows = []
    with_ids = draw(st.booleans())
    with_replicas = draw(st.booleans())
    for line, body in enumerate(draw(st.lists(BODIES, min_size=1, max_size=12)), 1):
        ids = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))) if with_ids else None
        tokens = len(ids) if ids is not None else draw(st.none() | st.integers(1, 200))
        row = LoggedRequest(line, body=body, token_ids=ids, prompt_tokens=tokens)
        if with_replicas:
            row = replace(row, replica=draw(st.sampled_from(["r0", "r1"])))
        if tokens is not None and draw(st.booleans()):
            row = replace(row, cached_tokens=draw(st.integers(0, tokens)))
        rows.append(row)
    return rows


def diagnosed(sample: Any, capacity: int = 640, replicas: int = 2, warmup: float = 0.0) -> Diagnosis:
    made = SimulationSettings(replica=ReplicaSettings(capacity_tokens=capacity))
    return diagnose(
        sample,
        ["predicted_finish"],
        replicas=replicas,
        rate=1.0,
        seed=1,
        settings=made,
        warmup_share=warmup,
    )


@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from([4_000, 100_000]))
def test_the_account_is_exact(rows: list[LoggedRequest], capacity: int) -> None:
    sample = sample_of_log("log", rows)
    diagnosis = diagnosed(sample, capacity)
    account = diagnosis.account
    numbers = [number for number, counts in enumerate(diagnosis.counted) if counts]
    assert account.prompt_tokens == sum(sample.trace.requests[number].prompt_tokens for number in numbers)
    assert account.prompt_tokens - account.cached_tokens == sum(tokens for _, tokens in account.lost)
    if any(row.cached_tokens is not None for row in rows):
        assert account.cached_tokens == sum(sample.measured_tokens(number) or 0 for number in numbers)
    gap = sum(account.tokens(cause) for cause in (Cause.CAPACITY, Cause.ROUTING, Cause.ENGINE))
    assert diagnosis.gap_tokens == gap
    for cause, tokens in account.lost:
        if cause not in (Cause.ROUTING, Cause.ENGINE):
            assert tokens >= 0, (cause, tokens)
    assert account.tokens(Cause.CHANGING_TEXT) == sum(
        win.tokens for win in diagnosis.levels.wins if win.mended.edit.cause is Cause.CHANGING_TEXT
    )
    for win in diagnosis.levels.wins:
        for doc, mended in zip(win.mended.docs, win.mended.edit.apply(win.mended.docs), strict=True):
            assert mended.own_bytes == doc.own_bytes, "an edit changed a prompt's length"


@given(BODIES)
def test_segments_are_the_canonical_text(body: dict[str, Any]) -> None:
    assert prompt_doc(body).text == canonical_text(body)


def test_segments_of_prompts_and_inputs() -> None:
    body = {"prompt": "once upon", "response_format": {"type": "text"}}
    doc = prompt_doc(body)
    assert doc.text == canonical_text(body)
    assert [segment.place for segment in doc.segments] == ["response_format", "prompt"]
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    places = [segment.place for segment in prompt_doc({"messages": [call]}).segments]
    assert places == ["message 0 (assistant)", "message 0 (assistant).tool_calls"]


@given(st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\xff", b"")), max_size=20))
def test_the_prefix_set_finds_the_longest_common_prefix(texts: list[bytes]) -> None:
    known = PrefixSet()
    for number, text in enumerate(texts):
        common, earlier = known.add(text, number)
        assert common == max((naive_prefix(text, other) for other in texts[:number]), default=0)
        assert (earlier is None) == (number == 0)
        if earlier is not None:
            assert naive_prefix(text, texts[earlier]) == common


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 300))
def test_common_prefix(one: bytes, other: bytes, shared: int) -> None:
    assert common_prefix(one, other) == naive_prefix(one, other)
    head = (one * 3)[:shared]
    assert common_prefix(head + one, head + other) == naive_prefix(head + one, head + other)


def naive_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_shares_are_those_of_the_simulator() -> None:
    sample = open_sample("mooncake", requests=400)
    made = SimulationSettings(replica=ReplicaSettings(capacity_tokens=200_000))
    diagnosis = diagnosed(sample, 200_000, replicas=3, warmup=made.warmup_share)
    (result,) = simulate(sample.trace, ["predicted_finish"], replicas=3, seed=1, settings=made)
    share = diagnosis.account.share
    assert share(diagnosis.ideal_tokens) == result.ideal_cached_share
    assert share(diagnosis.account.cached_tokens) == result.cached_share
    assert diagnosis.requests == result.requests
    assert diagnosis.account.tokens(Cause.CAPACITY) > 0


def test_conversations_of_a_log_are_replayed_turn_by_turn() -> None:
    rows = [
        LoggedRequest(
            2 * turn + conversation + 1,
            session=f"c{conversation}",
            body={"messages": [{"role": "user", "content": f"c{conversation} " + "word " * 60 * (turn + 1)}]},
        )
        for turn in range(4)
        for conversation in range(2)
    ]
    sample = sample_of_log("log", rows)
    assert sample.trace.in_sessions
    assert [request.session for request in sample.trace.requests] == ["c0"] * 4 + ["c1"] * 4
    assert diagnosed(sample, 100_000).account.cached_tokens > 0


def test_the_pool_is_one_lru_cache_of_the_fleets_size() -> None:
    rows = [
        LoggedRequest(k + 1, block_keys=(k % 7 * 10 + 1, k % 7 * 10 + 2), block_tokens=16, prompt_tokens=33)
        for k in range(40)
    ]
    # Seven prompts of two blocks in turn; a head is younger than its tail, so it is the last to go.
    for blocks, hits in ((12, 0), (13, 33 * 16), (14, 33 * 32), (20, 33 * 32)):
        told = [replace(row, replica="r0") for row in rows]
        diagnosis = diagnosed(sample_of_log("log", told), blocks * 8, replicas=2)
        assert (diagnosis.pooled_tokens, diagnosis.ideal_tokens) == (hits, 33 * 32)
        alone = diagnosed(sample_of_log("log", told), blocks * 16, replicas=1)
        assert (alone.pooled_tokens, alone.as_routed_tokens) == (hits, hits)


def conversation(turns: int, **told: Any) -> list[LoggedRequest]:
    """One conversation: questions of 400 characters, answers of 800."""
    said: list[dict[str, str]] = []
    rows = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"{turn} " + "ask " * 100})
        rows.append(LoggedRequest(turn + 1, session="c", body={"messages": list(said)}, **told))
        said.append({"role": "assistant", "content": f"{turn} " + "answer! " * 100})
    return rows


def test_answers_are_cached_like_prompts() -> None:
    """Each turn adds about 100 + 200 tokens, of which only the question is new."""
    diagnosis = diagnosed(sample_of_log("log", conversation(5)), 100_000)
    new = diagnosis.account.prompt_tokens - diagnosis.ideal_tokens
    assert new == pytest.approx(5 * 103, abs=5 * 16)
    assert diagnosis.account.cached_tokens == diagnosis.ideal_tokens, "the simulated replicas keep them, too"


def test_answers_whose_reasoning_is_dropped_are_not_reused() -> None:
    diagnosis = diagnosed(sample_of_log("log", conversation(5, output_tokens=900)), 100_000)
    new = diagnosis.account.prompt_tokens - diagnosis.ideal_tokens
    assert new == pytest.approx(5 * 103 + 4 * 203, abs=5 * 16)


def test_answers_token_by_token_where_the_next_turn_goes_on_from_the_prompt() -> None:
    rows = []
    for row in conversation(4):
        assert row.body is not None
        text = prompt_doc(row.body).text
        rows.append(replace(row, token_ids=tuple(text), prompt_tokens=len(text)))
    new = [len(rows[0].token_ids or ())]  # then what is left of a block, and the question with its label
    diagnosis = diagnosed(sample_of_log("log", rows), 100_000)
    assert diagnosis.account.prompt_tokens - diagnosis.ideal_tokens <= new[0] + 3 * (408 + 16)
    again = [
        replace(row, token_ids=(7 + row.line, *(row.token_ids or ())), prompt_tokens=None) for row in rows
    ]
    assert diagnosed(sample_of_log("log", again), 100_000).ideal_tokens == 0


def test_measured_tokens_are_put_in_proportion_where_lengths_are_estimates() -> None:
    body = {"messages": [{"role": "user", "content": "x" * 391}]}  # with its label 397 bytes
    rows = [LoggedRequest(1, body=body, prompt_tokens=1000, cached_tokens=500), LoggedRequest(2, body=body)]
    sample = sample_of_log("log", rows)
    tokens = sample.trace.requests[0].prompt_tokens
    assert tokens == pytest.approx(1000, rel=0.3)
    assert sample.measured_tokens(0) == round(tokens / 2)
    assert diagnosed(sample, 100_000).requests == 1


def test_reuse_distances_are_those_of_an_lru_cache() -> None:
    rng = random.Random(1)
    prompts = [
        (tuple(range(app * 100, app * 100 + rng.randrange(1, 9))), 16 * 9)
        for app in (rng.randrange(6) for _ in range(200))
    ]
    distances = list(reuse_distances(prompts, 16))
    for blocks in (3, 10, 30):
        cache: dict[int, None] = {}
        for (ids, _), row in zip(prompts, distances, strict=True):
            hits = 0
            while hits < len(ids) and ids[hits] in cache:
                hits += 1
            assert sum(distance <= blocks for distance in row) == hits
            for block in reversed(ids):
                cache.pop(block, None)
                cache[block] = None
            while len(cache) > blocks:
                del cache[next(iter(cache))]


def test_a_band_of_the_histogram_for_every_reused_token() -> None:
    found = need([16, 160, 1_600, 16_000], 16, replica_tokens=160, capacity_tokens=320)
    assert sum(tokens for _, _, tokens in found.bands) == 4 * 16
    assert found.lost == 2 * 16
    assert not found.churns


def test_ideal_of_a_log_is_the_bound_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "bodies.jsonl"
    bodies = [{"messages": [{"role": "user", "content": "hello " * (50 + k % 3)}]} for k in range(9)]
    path.write_bytes(b"\n".join(map(orjson.dumps, bodies)))
    sample = open_sample(str(path))
    bound = ideal_cached_share(
        [(request.block_ids, request.prompt_tokens, True) for request in sample.trace.requests], 16
    )
    diagnosis = diagnosed(sample, 100_000)
    assert diagnosis.account.share(diagnosis.ideal_tokens) == bound


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop1234",
        "Bearer abcdef.ghijkl-mnop",
        "password=hunter2",
        '"api_key": "s3cret"',
        "jo.doe@example.org",
        "4111 1111 1111 1111",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
        "AKIAIOSFODNN7EXAMPLE",
        "dGhpcyBpcyBhIHNlY3JldCB0b2tlbiAx",
    ],
)
def test_secrets_are_masked(secret: str) -> None:
    hidden = secret.split("=")[-1].split(": ")[-1].strip('"').removeprefix("Bearer ")
    assert hidden not in masked(f"before {secret} after")
    text = f"first line\nNow 10:00, key {secret} and more".encode()
    for at in range(text.index(b"Now"), len(text)):
        assert hidden[4:] not in snippet(text, at)


def test_what_is_no_secret_stays() -> None:
    text = "Today is 2026-11-29T10:31:05Z, 12 seats in flight LH1234, see https://example.org/rules"
    assert masked(text) == text
