"""``warmroute compare``: two servers on the same prompts; accepted, rejected or undecided by a fixed rule."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from sim.acceptance.agreement import agreement, kl_divergence
from sim.acceptance.token_answers import TokenAnswer
from sim.acceptance.verdict import Rule, verdict
from tests.replica.serving import replica
from tests.sim.commands import exit_code
from tests.sim.diagnose_logs import chats, write
from warmroute import main

Tokens = list[tuple[str, dict[str, float]]]
Answerer = Callable[[int, Mapping[str, Any]], Tokens]


def likely(token: str, probability: float = 0.9) -> tuple[str, dict[str, float]]:
    """A token and the distribution it was the likeliest of."""
    rest = "x" if token != "x" else "y"
    return token, {token: math.log(probability), rest: math.log(1.0 - probability)}


def same(number: int, body: Mapping[str, Any]) -> Tokens:
    return [likely("a"), likely("b"), likely("c"), likely("d")]


@asynccontextmanager
async def server(
    answerer: Answerer = same, *, logprobs: bool = True, status: int = 200, key: str | None = None
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Streams what ``answerer`` says to request number n; gives its URL and what it received."""
    received: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get("authorization") != key:
            return web.json_response({"error": {"message": "who are you"}}, status=401)
        if status != 200 or (body.get("logprobs") and not logprobs):
            return web.json_response({"error": {"message": "no"}}, status=status if status != 200 else 400)
        received.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for token, top in answerer(len(received) - 1, body):
            choice: dict[str, Any] = {"index": 0}
            listed = [{"token": name, "logprob": value} for name, value in top.items()]
            if "messages" in body:
                choice["delta"] = {"content": token + " "}
                if body.get("logprobs"):
                    entry = {"token": token, "logprob": top[token], "top_logprobs": listed}
                    choice["logprobs"] = {"content": [entry]}
            else:
                choice["text"] = token + " "
                choice["logprobs"] = {"tokens": [token], "top_logprobs": [top]}
            await response.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}", received
    finally:
        await runner.cleanup()


def run(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    candidate: Answerer = same,
    baseline: Answerer = same,
    *arguments: str,
    prompts: list[dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[int, Any]:
    """Exit code and JSON of a comparison. Times are not looked at: the machine may be busy."""
    path = write(folder, prompts or chats(requests=80))

    async def scenario() -> int:
        async with server(baseline, **options) as (one, _), server(candidate, **options) as (other, _):
            command = ["compare", path, "--baseline", one, "--candidate", other, "--json"]
            return await asyncio.to_thread(main, [*command, "--most-slower", "1000", *arguments])

    code = asyncio.run(scenario())
    said = capsys.readouterr()
    return code, orjson.loads(said.out) if said.out else said.err


def flipping(every: int) -> Answerer:
    """Another third token in one answer of ``every``."""

    def answerer(number: int, body: Mapping[str, Any]) -> Tokens:
        return [likely("a"), likely("b"), likely("z" if number % every == 0 else "c"), likely("d")]

    return answerer


def words(made: Any) -> dict[str, str]:
    return {one["name"]: one["verdict"] for one in made["measures"]}


def test_an_equal_candidate_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, made = run(capsys, tmp_path, same, same, "--require")
    assert code == 0
    assert (made["verdict"], made["prompts"]) == ("accepted", 80)
    assert set(words(made)) == {
        "answers that flip",
        "top tokens that differ",
        "KL, nats",
        "TTFT, share slower",
    }


def test_few_prompts_prove_little(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, made = run(capsys, tmp_path, same, same, "--require", "--requests", "10")
    assert code == 1
    assert made["verdict"] == "undecided"
    assert words(made)["answers that flip"] == "undecided", "none of 10 may be up to 30% of all"


def test_a_candidate_that_flips_answers_is_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, made = run(capsys, tmp_path, flipping(3))
    assert code == 0, "the comparison is done, whatever it says"
    assert made["verdict"] == "rejected"
    assert words(made)["answers that flip"] == "rejected"
    flips = next(one for one in made["measures"] if one["name"] == "answers that flip")
    assert flips["candidate"]["mean"] == pytest.approx(1 / 3, abs=0.02)


def test_a_baseline_that_flips_as_much_is_noise(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, made = run(capsys, tmp_path, same, flipping(3), "--most-flips", "0.3", "--most-mismatches", "0.3")
    flips = next(one for one in made["measures"] if one["name"] == "answers that flip")
    assert flips["noise"]["mean"] > 0.3
    assert made["verdict"] == "accepted"


def test_the_same_tokens_with_other_probabilities(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def unsure(number: int, body: Mapping[str, Any]) -> Tokens:
        return [likely(token, 0.55) for token, _ in same(number, body)]

    _, made = run(capsys, tmp_path, unsure)
    assert words(made)["answers that flip"] == "accepted"
    assert words(made)["KL, nats"] == "rejected"
    kl = next(one for one in made["measures"] if one["name"] == "KL, nats")
    expected = 0.9 * math.log(0.9 / 0.55) + 0.1 * math.log(0.1 / 0.45)
    assert kl["candidate"]["mean"] == pytest.approx(expected, rel=1e-6)


def test_without_logprobs_words_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, made = run(capsys, tmp_path, flipping(2), logprobs=False)
    assert "KL, nats" not in words(made)
    assert words(made)["answers that flip"] == "rejected"


def test_text_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = [{"prompt": f"once {number}", "max_tokens": 3} for number in range(80)]
    _, made = run(capsys, tmp_path, flipping(2), prompts=prompts)
    assert {"KL, nats"} <= set(words(made))
    assert words(made)["answers that flip"] == "rejected"


def test_servers_that_want_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPARE_TEST_KEY", "sesame")
    code, made = run(capsys, tmp_path, same, same, "--api-key-env", "COMPARE_TEST_KEY", key="Bearer sesame")
    assert (code, made["verdict"]) == (0, "accepted")
    code, said = run(capsys, tmp_path, key="Bearer sesame")
    assert code == 1 and "status 401" in said


def test_a_server_that_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = run(capsys, tmp_path, status=500)
    assert code == 1
    assert "no prompt was answered by both servers: status 500" in said


def test_real_replicas_with_equal_and_with_other_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, [{"messages": [{"role": "user", "content": f"Number {n}"}]} for n in range(12)])

    async def scenario() -> None:
        async with replica(seed=1) as one, replica(seed=1) as twin, replica(seed=2) as stranger:
            for other, flips in ((twin, 0.0), (stranger, 1.0)):
                command = ["compare", path, "--baseline", one.url, "--candidate", other.url, "--json"]
                assert await asyncio.to_thread(main, [*command, "--output-tokens", "8"]) == 0
                made = orjson.loads(capsys.readouterr().out)
                measures = {measure["name"]: measure["candidate"] for measure in made["measures"]}
                assert measures["answers that flip"]["mean"] == flips
                assert (measures["KL, nats"]["mean"] > 0.01) == bool(flips)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("{p}", "--baseline", "a", "--candidate", "http://b:1"), 2, "--baseline: a: expected http://"),
        (("/no/such/file", "--baseline", "http://a:1", "--candidate", "http://b:1"), 2, "/no/such/file"),
        (("{one}", "--baseline", "http://a:1", "--candidate", "http://b:1"), 2, "at least 2"),
        (
            ("{p}", "--baseline", "http://127.0.0.1:1", "--candidate", "http://127.0.0.1:1"),
            1,
            "cannot be reached: Connection refused",
        ),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    paths = {"p": write(tmp_path, chats(requests=4)), "one": write(tmp_path, [{"prompt": "x"}], "one.jsonl")}
    assert exit_code(["compare", *(argument.format(**paths) for argument in arguments)]) == code
    assert expected in capsys.readouterr().err


ANSWERS = st.lists(st.sampled_from("abc"), max_size=6).map(
    lambda tokens: TokenAnswer(tuple(tokens), (), 0.1, 0.2)
)


@given(ANSWERS, ANSWERS)
def test_agreement_ends_at_the_first_difference(one: TokenAnswer, other: TokenAnswer) -> None:
    made = agreement(one, other)
    assert one.tokens[: made.matched] == other.tokens[: made.matched]
    assert made.flipped == (one.tokens != other.tokens)
    assert made.positions - made.matched == int(made.flipped)
    assert agreement(other, one) == made


DISTRIBUTIONS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1.0), min_size=1).map(
    lambda weights: {
        token: math.log(0.97 * weight / sum(weights.values())) for token, weight in weights.items()
    }
)


@given(DISTRIBUTIONS, DISTRIBUTIONS)
def test_kl_is_zero_for_itself_and_never_below(one: dict[str, float], other: dict[str, float]) -> None:
    assert kl_divergence(one, one) == pytest.approx(0.0, abs=1e-9)
    assert kl_divergence(one, other) >= 0.0


def test_errors_of_the_candidate_alone_reject_it() -> None:
    good = TokenAnswer(("a",), (), 0.1, 0.2)
    bad = TokenAnswer((), (), None, 0.2, "status 500")
    assert verdict([good] * 3, [good, good, bad], [good] * 3, Rule(1, 1, 1, 10)).word == "rejected"
