"""``warmroute diagnose``: text, JSON and HTML; bad files are refused with line and reason."""

import gzip
from pathlib import Path

import orjson
import pytest

from router.config import ModelConfig
from router.proxy.exact_model import load_exact_model
from tests.router.tokenizer_folder import write_folder
from tests.sim.commands import exit_code
from tests.sim.diagnose_logs import Row, chats, system_prompt, write
from warmroute import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["diagnose", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def dated(number: int) -> str:
    return f"It is 10:{number % 60:02}, <b>key</b> sk-abcdefghijklmnop1234.\n{system_prompt()}"


def log_rows() -> list[Row]:
    rows = []
    for number, body in enumerate(chats(system=dated)):
        tokens = sum(len(message["content"]) for message in body["messages"]) // 4
        rows.append(
            {
                "time": f"2026-11-29T10:{number // 60:02}:{number % 60:02}+00:00",
                "app": "support" if number % 2 else "sales",
                "replica": f"r{number % 3}",
                "body": body,
                "prompt_tokens": tokens,
                "cached_tokens": 0,
                "output_tokens": 30,
            }
        )
    return rows


def test_a_log_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, write(tmp_path, log_rows()), "--warmup", "0")
    assert code == 0
    assert "0.0% of prompt tokens were cached (measured)" in out
    assert "3 replicas" in out, "as many as the log names"
    assert "1. text that changes: a date or time in message 0 (system), at token " in out
    assert "dollars a day" in out
    assert "support" in out and "sales" in out
    assert "sk-abcdefghijklmnop" not in out


@pytest.mark.parametrize(
    ("given", "title", "assumed"),
    [
        ([], "3 replicas of 3,000,000 KV tokens (assumed)", True),
        (["--capacity", "400000"], "3 replicas of 400,000 KV tokens", False),
        (["--model", "llama-3.1-8b"], "3 replicas of ", False),
    ],
)
def test_a_cache_size_that_is_assumed_is_said_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: list[str], title: str, assumed: bool
) -> None:
    log = write(tmp_path, log_rows())
    code, out, _ = run(capsys, log, *given)
    said = " ".join(out.split())
    assert code == 0 and title in said
    assert ("3,000,000 KV tokens a replica are assumed" in said) is assumed
    assert ("(assumed)" in said) is ("--capacity TOKENS" in said) is assumed
    assert orjson.loads(run(capsys, log, *given, "--json")[1])["capacity_assumed"] is assumed


def test_json_adds_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, write(tmp_path, log_rows()), "--json", "--policy", "predicted_finish,round_robin"
    )
    assert code == 0
    made = orjson.loads(out)
    assert made["prompt_tokens"] - made["cached_tokens"] == sum(made["lost_tokens"].values())
    assert {"mended prompts", "ideal", "pooled", "round_robin", "as routed", "measured"} <= set(
        made["cached_share"]
    )
    (finding,) = [one for one in made["findings"] if one["cause"] == "text that changes"]
    assert finding["ms_per_request"] > 0 and finding["dollars_per_day"] > 0
    assert made["counted"] < made["requests"], "a log with times warms up first"


def test_what_a_fix_saves_can_be_checked_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A step takes 8 ms whatever is in it: a hit saves its tokens alone, 62.5 µs each, more deep down."""
    arguments = ("--warmup", "0", "--json", "--dollars-per-hour", "3")
    code, out, _ = run(capsys, write(tmp_path, log_rows()), *arguments)
    told = orjson.loads(out)
    assert code == 0
    mean = told["prompt_tokens"] // told["counted"]
    token_ms = 0.0625 * (mean * (1 + mean / 2 / 64_000) - (1 + 0.5 / 64_000)) / (mean - 1)
    (fix, *_) = told["findings"]
    assert fix["ms_per_request"] == pytest.approx(fix["tokens"] / told["counted"] * token_ms, abs=1e-3)
    a_day = 86_400.0  # one request a second
    assert fix["dollars_per_day"] == pytest.approx(fix["ms_per_request"] / 1e3 * a_day / 3_600 * 3, rel=1e-3)


def test_html_is_one_safe_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, _, _ = run(capsys, write(tmp_path, log_rows()), "--html", str(page))
    assert code == 0
    text = page.read_text()
    assert "<svg" in text and "text that changes" in text
    assert "<b>key</b>" not in text and "&lt;b&gt;key" in text
    assert "http://" not in text and "https://" not in text


def test_more_reported_than_ideal_is_said_as_that(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [row | {"cached_tokens": row["prompt_tokens"]} for row in log_rows()]
    code, out, _ = run(capsys, write(tmp_path, rows), "--warmup", "0", "--json")
    told = orjson.loads(out)
    assert code == 0 and told["gap_tokens"] < 0
    points = 100 * -told["gap_tokens"] / told["prompt_tokens"]
    _, out, _ = run(capsys, write(tmp_path, rows), "--warmup", "0")
    assert f"What was measured is {points:.1f} points above the ideal: " in out
    assert f"not explained by replay +{points:.1f}" in out
    assert "below zero: the replicas reported more than caches fed like this have" in out
    assert "reported less" not in out and "gap of" not in out


def test_a_trace_has_no_words_but_an_account(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "mooncake", "--requests", "200", "--capacity", "100000", "--replicas", "2")
    assert code == 0
    assert "capacity: " in out
    assert "99% of what an infinite cache has takes" in out


def test_a_packed_log_of_block_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl.gz"
    row = {"block_keys": [1, 2, 3], "block_tokens": 64, "prompt_tokens": 200, "replica": "a"}
    path.write_bytes(gzip.compress(b"\n".join([orjson.dumps(row)] * 3)))
    code, out, _ = run(capsys, str(path), "--json")
    made = orjson.loads(out)
    assert (code, made["block_tokens"], made["cached_tokens"]) == (0, 64, 2 * 192)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{oops", "line 2: not JSON"),
        (b"[1]", "line 2: a JSON list"),
        (b'{"body": 7}', "line 2: body is 7"),
        (b'{"body": {"model": "m"}}', "line 2: the body has no messages, prompt or input"),
        (b'{"model": "m"}', "line 2: no prompt"),
        (b'{"prompt": "x", "time": "noon"}', "line 2: time is 'noon'"),
        (b'{"prompt": "x", "cached_tokens": 3}', "cached_tokens without prompt_tokens"),
        (
            b'{"prompt": "x", "cached_tokens": 3, "prompt_tokens": 2}',
            "cached_tokens is 3; expected at most the 2",
        ),
        (b'{"prompt": "x", "prompt_tokens": 0}', "prompt_tokens is 0"),
        (b'{"prompt_token_ids": [-1]}', "prompt_token_ids"),
        (b'{"block_keys": [1], "block_tokens": 16, "prompt_tokens": 64}', "a key for each full block"),
        (b'{"block_keys": [1], "block_tokens": 16, "prompt_tokens": 16}', "rows of different kinds"),
    ],
)
def test_bad_rows_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: bytes, expected: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    code, out, err = run(capsys, str(path))
    assert (code, out) == (2, "")
    assert str(path.name) in err and expected in err


def test_no_such_file_and_no_such_policy(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "/no/such/file")
    assert code == 2 and "/no/such/file" in err
    assert exit_code(["diagnose", "mooncake", "--policy", "magic"]) == 2
    err = capsys.readouterr().err
    assert "magic" in err and "predicted_finish" in err


def test_the_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["diagnose", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "None" not in out
    assert "default: as many as the log or the router names, else 8" in out


def test_prompts_token_by_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tokenizer")
    bodies = chats()
    exact = load_exact_model("m", ModelConfig(tokenizer=str(folder)))
    lengths = [len(exact.tokens(body)) for body in bodies]
    rows = [
        {"body": body, "prompt_tokens": length, "cached_tokens": 0}
        for body, length in zip(bodies, lengths, strict=True)
    ]
    code, out, _ = run(capsys, write(tmp_path, rows), "--tokenizer", str(folder), "--json")
    assert (code, orjson.loads(out)["prompt_tokens"]) == (0, sum(lengths))
    rows[3]["prompt_tokens"] = 5_000
    code, out, _ = run(capsys, write(tmp_path, rows), "--tokenizer", str(folder))
    assert code == 0
    assert "1 prompts have another length in token ids than their replica counted" in out


@pytest.mark.parametrize(
    ("row", "arguments", "expected"),
    [
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            ("--tokenizer", "{folder}"),
            "line 2: the prompt cannot",
        ),
        ({"prompt": "x"}, ("--tokenizer", "/no/such/folder"), "/no/such/folder"),
        ({"prompt": "x"}, ("--chat-template", "x"), "goes with --tokenizer"),
    ],
)
def test_what_cannot_be_tokenized(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, row: Row, arguments: tuple[str, ...], expected: str
) -> None:
    folder = write_folder(tmp_path / "tokenizer")
    path = write(tmp_path, [{"prompt": "fine"}, row])
    code, _, err = run(capsys, path, *(argument.format(folder=folder) for argument in arguments))
    assert code == 2
    assert expected in err
