"""Every fault in the prompts is found by name, and wins what a log without the fault has more of."""

import random
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.diagnose.account import Cause
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.findings import Finding, findings
from sim.diagnose.sample import open_sample
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from tests.sim.diagnose_logs import TOOLS, Body, Row, chats, retrieval, system_prompt, write


def diagnosed(
    folder: Path,
    rows: list[Row],
    *,
    capacity: int = 1_000_000,
    replicas: int = 2,
    policy: str = "predicted_finish",
) -> Diagnosis:
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=capacity))
    sample = open_sample(write(folder, rows))
    return diagnose(
        sample, [policy], replicas=replicas, rate=1.0, seed=1, settings=settings, warmup_share=0.0
    )


def worst(diagnosis: Diagnosis) -> Finding:
    return findings(diagnosis)[0]


def date(number: int) -> str:
    return f"2026-11-29 10:{number // 60:02}:{number % 60:02}"


def trace_id(number: int) -> str:
    return str(uuid.UUID(int=random.Random(number).getrandbits(128)))


def name(number: int) -> str:
    who = ("Ann", "Bob", "Carol", "Dan", "Eve", "Frank", "Grace", "Heidi", "Ivan", "Judy")[number % 10]
    return f"You talk to {who} {'abcdefgh'[number // 10]}.\n"


@pytest.mark.parametrize(
    ("system", "changing", "title"),
    [
        ("You are an agent.\nToday is {}.\nRules:\n", date, "a date or time in message 0 (system)"),
        ("You are an agent. Trace {}. Rules: ", trace_id, "a UUID in message 0 (system)"),
        ("You are an agent.\n{}Rules:\n", name, "a line that changes in message 0 (system)"),
    ],
)
def test_what_changes_in_a_system_prompt_is_found_and_priced(
    tmp_path: Path, system: str, changing: Callable[[int], str], title: str
) -> None:
    def value_last(number: int, body: Body) -> Body:
        return body | {"messages": [*body["messages"], {"role": "user", "content": changing(number)}]}

    faulty = diagnosed(
        tmp_path, chats(system=lambda number: system.format(changing(number)) + system_prompt())
    )
    mended = diagnosed(
        tmp_path, chats(system=lambda number: system.format("") + system_prompt(), body=value_last)
    )
    found = worst(faulty)
    assert found.cause is Cause.CHANGING_TEXT
    assert found.title.startswith(title)
    assert "end of the prompt" in found.advice
    assert found.tokens == pytest.approx(mended.ideal_tokens - faulty.ideal_tokens, rel=0.03)
    here, earlier = found.evidence
    assert here.removeprefix("here:    ") != earlier.removeprefix("earlier: ")


def test_two_changing_lines_are_both_found(tmp_path: Path) -> None:
    def system(number: int) -> str:
        return f"You are an agent.\nNow: 10:{number:02}:00\nRequest {number * 7919:08}\n{system_prompt()}"

    faulty = diagnosed(tmp_path, chats(system=system))
    mended = diagnosed(tmp_path, chats())
    assert [one.cause for one in findings(faulty)].count(Cause.CHANGING_TEXT) >= 1
    gap = mended.ideal_tokens - faulty.ideal_tokens
    assert faulty.account.tokens(Cause.CHANGING_TEXT) == pytest.approx(gap, rel=0.05)


def test_numbers_in_what_users_ask_are_no_culprit(tmp_path: Path) -> None:
    def ask(number: int, body: Body) -> Body:
        messages = [*body["messages"][:-1], {"role": "user", "content": f"Where is order {number}?"}]
        return body | {"messages": messages}

    assert not [
        one for one in findings(diagnosed(tmp_path, chats(body=ask))) if one.cause is Cause.CHANGING_TEXT
    ]


@pytest.mark.parametrize("numbered", [True, False])
def test_passages_in_another_order(tmp_path: Path, numbered: bool) -> None:
    faulty = diagnosed(tmp_path, retrieval(numbered=numbered))
    mended = diagnosed(tmp_path, retrieval(numbered=numbered, in_order=True))
    found = worst(faulty)
    assert found.cause is Cause.PASSAGES
    assert "message 0 (user)" in found.title
    assert "stable key" in found.advice
    assert found.tokens == pytest.approx(mended.ideal_tokens - faulty.ideal_tokens, rel=0.1)
    assert not [one for one in findings(mended) if one.cause is Cause.PASSAGES]


def test_tools_in_another_order(tmp_path: Path) -> None:
    def shuffled(number: int, body: Body) -> Body:
        return body | {"tools": random.Random(number).sample(TOOLS, len(TOOLS))}

    faulty = diagnosed(tmp_path, chats(body=shuffled))
    mended = diagnosed(tmp_path, chats(body=lambda number, body: body | {"tools": TOOLS}))
    found = worst(faulty)
    assert found.cause is Cause.TOOLS
    assert found.tokens == pytest.approx(mended.ideal_tokens - faulty.ideal_tokens, rel=0.05)


def test_trimmed_conversations(tmp_path: Path) -> None:
    def trimmed(number: int, body: Body) -> Body:
        messages = body["messages"]
        return body | {"messages": [messages[0], *messages[1:][-7:]]}

    rows = chats(requests=120, conversations=4, body=trimmed)
    found = worst(diagnosed(tmp_path, rows))
    assert found.cause is Cause.TRIMMED
    assert "older messages" in found.evidence[0]
    # Of 7 messages kept, 5 stood one exchange further down in the turn before: about 5 x 35 tokens a turn.
    assert 100 < found.tokens / found.requests < 220
    whole = diagnosed(tmp_path, chats(requests=120, conversations=4))
    assert not whole.account.tokens(Cause.TRIMMED)


@pytest.mark.parametrize(
    ("field", "cause"), [("cache_salt", Cause.SALT), ("model", Cause.MODEL)], ids=["salt", "model"]
)
def test_names_that_keep_equal_prompts_apart(tmp_path: Path, field: str, cause: Cause) -> None:
    rows = chats(body=lambda number, body: body | {field: f"secret-name-{number % 5}"})
    faulty = diagnosed(tmp_path, rows)
    mended = diagnosed(tmp_path, chats())
    found = worst(faulty)
    assert found.cause is cause
    assert faulty.account.tokens(cause) == pytest.approx(mended.ideal_tokens - faulty.ideal_tokens, rel=0.05)
    if cause is Cause.SALT:
        assert "secret-name" not in " ".join(found.evidence)


def test_equal_text_with_other_tokens_is_the_template(tmp_path: Path) -> None:
    rows = []
    for number, body in enumerate(chats()):
        text = "".join(message["content"] for message in body["messages"])
        ids = [1000 + number, *(ord(letter) for letter in text)]  # a template that begins with something new
        rows.append({"body": body, "prompt_token_ids": ids})
    found = worst(diagnosed(tmp_path, rows))
    assert found.cause is Cause.TEMPLATE
    assert "from token 0" in found.title
    assert "chat template" in found.advice


def test_a_working_set_just_above_the_cache_is_churn(tmp_path: Path) -> None:
    prompts = [
        {"model": "m", "prompt": f"Document {chr(97 + number % 10) * 4}.\n{system_prompt(number % 10)}"}
        for number in range(60)
    ]
    total = diagnosed(tmp_path, prompts)
    assert total.account.tokens(Cause.CAPACITY) == 0
    working_set = max(total.distances)
    found = worst(diagnosed(tmp_path, prompts, capacity=working_set * 9 // 10, replicas=1))
    assert found.cause is Cause.CAPACITY
    assert found.title.startswith("LRU churn")
    small = worst(diagnosed(tmp_path, prompts, capacity=working_set // 4, replicas=1))
    assert small.cause is Cause.CAPACITY
    assert not small.title.startswith("LRU churn")


def test_routing_that_spreads_prefixes(tmp_path: Path) -> None:
    rows = [{"body": body, "replica": f"r{number % 4}"} for number, body in enumerate(chats())]
    faulty = diagnosed(tmp_path, rows, replicas=4)
    assert faulty.as_routed_tokens is not None
    found = worst(faulty)
    assert found.cause is Cause.ROUTING
    assert faulty.account.tokens(Cause.ROUTING) == faulty.pooled_tokens - faulty.as_routed_tokens
    assert "predicted_finish wins" in found.advice
    assert found.advice.endswith("if the log is not of predicted_finish already")


@pytest.mark.parametrize(
    ("known", "says"),
    [
        (["round_robin"], "predicted_finish wins"),
        (["round_robin", "predicted_finish"], "predicted_finish wins"),
        (["predicted_finish"], "the log is of predicted_finish already, so no other policy"),
    ],
)
def test_a_log_that_names_its_policy_is_advised_no_policy_that_it_has(
    tmp_path: Path, known: list[str], says: str
) -> None:
    rows = [
        {"body": body, "replica": f"r{number % 4}", "policy": known[number % len(known)]}
        for number, body in enumerate(chats())
    ]
    found = worst(diagnosed(tmp_path, rows, replicas=4))
    assert found.cause is Cause.ROUTING and says in found.advice
    assert "if the log is not" not in found.advice


@pytest.mark.parametrize(
    ("reported", "advice"),
    [
        (lambda number, tokens: 0, "is prefix caching on"),
        (lambda number, tokens: 0 if number % 2 else tokens * 9 // 10, "only r1 fall short"),
        (lambda number, tokens: 0 if number % 8 < 2 else tokens * 9 // 10, "hit nothing at all"),
        (lambda number, tokens: tokens // 3, "less KV memory"),
    ],
    ids=["silent", "one replica", "some requests", "short"],
)
def test_replicas_that_report_less_than_replayed_caches(
    tmp_path: Path, reported: Callable[[int, int], int], advice: str
) -> None:
    rows = []
    for number, body in enumerate(chats(conversations=1)):
        tokens = sum(len(message["content"]) for message in body["messages"]) // 4
        usage = {
            "prompt_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": reported(number, tokens)},
        }
        rows.append(
            {"body": body, "usage": usage, "replica": f"r{number % 2}", "matched_tokens": tokens // 2}
        )
    diagnosis = diagnosed(tmp_path, rows)
    found = next(one for one in findings(diagnosis) if one.cause is Cause.ENGINE)
    assert advice in found.advice
    assert found.tokens == diagnosis.account.tokens(Cause.ENGINE)
    assert "believed by the router" in found.evidence[0]


def test_good_traffic_has_no_culprit(tmp_path: Path) -> None:
    assert not [one for one in findings(diagnosed(tmp_path, chats())) if one.cause is not Cause.BLOCKS]
