"""``warmroute simulate`` as its user sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import warmroute
from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from tests.sim.commands import exit_code

FEW = ["simulate", "--requests", "60", "--replicas", "2"]


def test_the_table_names_policies_and_what_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main([*FEW, "--policy", "round_robin,predicted_finish", "--rate", "0.5"]) == 0
    shown, said = capsys.readouterr()
    assert "0.5 times as fast: 60 requests on 2 replicas" in shown
    for word in ("round_robin", "predicted_finish", "TTFT s", "spills", "in SLO: TTFT within 1000 ms"):
        assert word in shown
    assert "…" not in shown.replace("KIND[,KIND…]", "")  # no column is cut
    assert said.splitlines()[0] == "round_robin: 60 requests"


def test_the_title_tells_pools_and_routers(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ["--decode-pool", "1", "--routers", "3", "--peer-lag", "0.1"]
    assert warmroute.main([*FEW, "--policy", "predicted_finish", *fleet]) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert "60 requests by 3 routers on 2 replicas and 1 that answer for them of" in title


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
        (["--policy", "bst"], "--policy: bst: unknown policy bst; expected one or more of"),
        (["--policy", ","], "no policy given"),
        (["--trace", "nowhere.jsonl"], "no file 'nowhere.jsonl'; expected a trace file"),
        (["--capacity", "100"], "capacity of 100 tokens: less than one block of 512"),
        (["--block-size", "100"], "line 1: 14 hash_ids, but 6758 tokens in blocks of 100 need 67"),
    ],
)
def test_wrong_arguments_are_explained(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert exit_code([*FEW, *arguments]) == 2
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert warmroute.main([*FEW, "--policy", "predicted_finish", *arguments]) == 0
    return capsys.readouterr().out


def test_a_roofline_instead_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--model", "llama-3.1-8b", "--gpu", "h200", "--precision", "fp8")
    assert "(llama-3.1-8b fp8 on 1 x h200)" in shown
    assert "llama" in run(capsys, "--model", "llama-3.1-8b", "--efficiency", "math=0.5,step_s=0.01")
    fits = RooflineStepTime.of("llama-3.1-8b", "h200", "fp8").kv_capacity_tokens()
    assert f"replicas of {fits:,} KV tokens" in shown  # what fits beside the weights


def test_everything_about_the_fleet_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--unlike", "1:slowdown=2.5,capacity=600000"],
        ["--change", "5:fail:1", "--change", "9:restart:1"],
        ["--routers", "2", "--peer-lag", "0.25"],
        ["--kv-events", "0.05", "--kv-removals", "5", "--kv-loss", "0.1"],
        ["--kv-pull", "--transfer", "5:1"],
        ["--decode-pool", "1", "--tell-max-tokens", "--report-lag", "1", "--report-interval", "3"],
    ):
        assert "predicted_finish" in run(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--change", "5:fail:2"], "change of replica 2: there are 2, counted from 0"),
        (["--unlike", "7:slowdown=2"], "unlike of replica 7: there are 2"),
        (["--transfer", "5:1"], "give --decode-pool N or --kv-pull, too"),
        (["--kv-pull", "--transfer", "5"], "expected MILLISECONDS:MICROSECONDS_PER_TOKEN such as 26:4.3"),
        (["--kv-loss", "0.1"], "give --kv-events SECONDS, too"),
        (["--model", "llama-3.1-70b"], "llama-3.1-70b in bf16 does not fit 1 x h100: use more GPUs"),
        (["--model", "llama-3.1-8b", "--gpu", "a100-80g", "--precision", "fp8"], "a100-80g has no fp8 math"),
    ],
)
def test_what_does_not_fit_together_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert exit_code([*FEW, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--change", "fail"], "argument --change: 'fail'; expected SECONDS:KIND:REPLICA"),
        (["--efficiency", "maths=1"], "argument --efficiency: 'maths=1'; expected KEY=VALUE, 0 or more"),
        (["--unlike", "0:speed=2"], "argument --unlike: '0:speed=2'; expected REPLICA:KEY=VALUE"),
        (["--unlike", "0:slowdown=-1"], "expected REPLICA:KEY=VALUE with KEY one of slowdown"),
        (["--compare", "2", "--rates", "1,x"], "argument --rates: '1,x'; expected numbers above 0"),
        (["--policy", "random,session,random"], "random,session,random: random given twice; expected each"),
    ],
)
def test_what_cannot_be_read_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        warmroute.main([*FEW, *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer-lag", "1"], "--peer-lag without effect: give --routers N, 2 or more, too"),
        (["--gpu", "l4"], "--gpu without effect: give --model MODEL, too"),
        (["--gpu", "h100"], "--gpu without effect: give --model"),  # the default, too
        (["--precision", "fp8", "--gpus", "2"], "--gpus and --precision without effect"),
        (["--efficiency", "math=0.5"], "--efficiency without effect"),
        (["--model", "llama-3.1-8b", "--step-time", "emufleet"], "--step-time and --model both say"),
        (["--eviction", "lfu"], "--eviction without effect: give --cache radix, too"),
        (["--kv-loss", "0"], "--kv-loss without effect: give --kv-events SECONDS, too"),
        (["--kv-removals", "1"], "--kv-removals without effect: give --kv-events"),
        (["--policy", "random", "--no-hold"], "--no-hold without effect: under random no request is held"),
        (
            ["--routers", "2", "--guard-caches"],
            "--guard-caches without effect: --routers without --peer-lag",
        ),
        (["--no-hold", "--guard-caches"], "--guard-caches without effect: --no-hold"),
        (["--compare", "2", "--rates", "1,2", "--rate", "1"], "--rate and --rates both say how fast"),
        (["--explain", "1", "--policy", "random,session", "--json"], "--json without effect: --explain"),
        (
            ["--explain", "1", "--policy", "random,session", "--routers", "2"],
            "--routers without effect: --explain",
        ),
        (["--think", "3"], "--think without effect: mooncake_conversation_1000.jsonl has times"),
        (["--trace", "chats", "--block-size", "17"], "--block-size 17: chats has blocks of"),
        (
            ["--lesson", "burst", "--policy", "random"],
            "--policy without effect: --lesson burst has",
        ),
        (["--lesson", "burst", "--json", "--explain", "1"], "--explain without effect: --lesson with --json"),
        (["--fidelity", "--seed", "3"], "--seed without effect: --fidelity takes nothing else"),
    ],
    ids=" ".join,
)
def test_an_option_that_would_do_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert exit_code(["simulate", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"warmroute simulate: {message}")
    assert said.out == "" and said.err.count("\n") == 1


def test_measured_runs_that_are_nowhere_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["simulate", "--fidelity", "/nowhere"]) == 2
    assert "/nowhere: no measured run" in capsys.readouterr().err


NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diagnose", "mooncake", "--gpu", "l4"], "--gpu without effect: give --model MODEL, too"),
        (["diagnose", "mooncake", "--think", "2"], "--think without effect: mooncake_conversation"),
        (["diagnose", "chats", "--block-size", "17"], "--block-size 17: chats has blocks of"),
        (["diagnose", "--url", NOBODY, "--capacity", "5"], "--capacity without effect: nothing is simulated"),
        (["diagnose", "--metrics", "a", "b", "--policy", "random"], "--policy without effect: nothing is"),
        (["replay", "--url", NOBODY, "--think", "3"], "--think without effect: mooncake_conversation"),
        (["replay", "--url", NOBODY, "--trace", "chats", "--block-size", "17"], "--block-size 17: chats has"),
        (["bench", "routing", "--think", "3"], "--think without effect: mooncake_conversation"),
        (["bench", "routers", "--trace", "chats", "--block-size", "17"], "--block-size 17: chats has blocks"),
    ],
    ids=" ".join,
)
def test_other_commands_refuse_them_alike(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert exit_code(arguments) == 2
    command = " ".join(arguments[: 2 if arguments[0] == "bench" else 1])
    assert capsys.readouterr().err.startswith(f"warmroute {command}: {message}")


def test_one_router_is_what_explain_looks_at(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--explain", "1", "--routers", "1", "--requests", "30", "--policy", "random,session"]
    assert exit_code(["simulate", *asked]) == 0
    assert "of 30 decisions" in capsys.readouterr().out


def test_the_fidelity_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.fidelity.check.fit_efficiency", lambda runs, first_share=1.0: Efficiency())
    assert warmroute.main(["simulate", "--fidelity"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "TTFT p50",
        "(within 10%)",
        "E2E mean",
        "defaults",
        "RTX4090_Llama-3.1-8B",
        "step_s=0.00193",
        "128 experts",
    ):
        assert text in shown
