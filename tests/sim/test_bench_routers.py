"""``warmroute bench routers``: several router processes on a real Redis, before emulated replicas."""

import json
from pathlib import Path

import pytest

import warmroute
from tests.fakes.redis_server import needs_redis

SMALL = ["--requests", "30", "--replicas", "2", "--speed", "50", "--rate", "5", "--warmup", "0", "--json"]


@needs_redis
def test_the_same_load_through_one_and_through_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["bench", "routers", "--routers", "1,2", *SMALL]) == 0
    one, two = json.loads(capsys.readouterr().out)["results"]
    assert (one["routers"], two["routers"]) == (1, 2)
    assert one["errors"] == two["errors"] == 0 and one["requests"] == two["requests"] == 30
    assert one["ttft_mean_of_first"] == 1.0
    assert two["ttft_mean_of_first"] == pytest.approx(two["ttft_s"]["mean"] / one["ttft_s"]["mean"], rel=0.01)
    # The trace's first prompts have some 10,000 tokens each: a second of prefill, whatever the wall says.
    assert min(one["ttft_s"]["mean"], two["ttft_s"]["mean"]) > 0.3
    assert two["max_over_mean_work"] >= 1.0, "where its requests went is told"


def test_without_redis_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert warmroute.main(["bench", "routers", *SMALL]) == 1
    assert "apt-get install redis-server" in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["0", "1,", "two", "1;2", "64"])
def test_counts_are_numbers(counts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as told:
        warmroute.main(["bench", "routers", "--routers", counts])
    assert told.value.code == 2 and "expected numbers from 1 to 32" in capsys.readouterr().err
