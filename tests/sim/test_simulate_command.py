"""``warmroute simulate`` as its user sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import warmroute

FEW = ["simulate", "--requests", "60", "--replicas", "2"]


def test_the_table_names_policies_and_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main([*FEW, "--policy", "round_robin,predicted_finish", "--rate", "0.5"]) == 0
    shown, said = capsys.readouterr()
    assert "0.5 times as fast: 60 requests on 2 replicas" in shown
    for word in ("round_robin", "predicted_finish", "TTFT s", "spills", "in SLO: TTFT within 1000 ms"):
        assert word in shown
    assert "…" not in shown.replace("KIND[,KIND…]", "")  # no column is cut
    assert said.splitlines()[0] == "round_robin: 60 requests"


def test_json_is_one_object_per_policy(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main([*FEW, "--policy", "round_robin,power_of_two", "--json", "--warmup", "0"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["requests"], row["errors"]) for row in rows] == [
        ("round_robin", 60, 0),
        ("power_of_two", 60, 0),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "bst"], "--policy bst: unknown policy bst; expected one or more of"),
        (["--policy", ","], "no policy given"),
        (["--trace", "nowhere.jsonl"], "no file 'nowhere.jsonl'; expected a trace file"),
        (["--capacity", "100"], "capacity of 100 tokens: less than one block of 512"),
        (["--block-size", "100"], "line 1: 14 hash_ids, but 6758 tokens in blocks of 100 need 67"),
    ],
)
def test_wrong_arguments_are_explained(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert warmroute.main([*FEW, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "argument --replicas: '0'; expected a whole number, 1 or more"),
        (["--rate", "fast"], "argument --rate: 'fast'; expected a number, above 0"),
        (["--warmup", "1"], "argument --warmup: '1'; expected a number, at least 0 and at most 0.99"),
        (["--step-time", "b200"], "argument --step-time: invalid choice: 'b200'"),
    ],
)
def test_numbers_out_of_range_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        warmroute.main(["simulate", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_simulator_brings_no_torch_and_no_network() -> None:
    code = (
        "import sys, sim.simulate_command, sim.workload.sources\n"
        "print(sorted({'torch', 'aiohttp', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
