"""``warmroute plan`` as its user sees it."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import warmroute
from sim.plan.plan_file import KINDS
from sim.plan.report_view import print_report
from tests.sim.plan_examples import EXAMPLES, FOLDER, example


def test_plain_output_has_each_line_with_formula_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["plan", str(FOLDER / "api_bill.yaml")]) == 0
    shown, said = capsys.readouterr()
    assert "without = full_input + output = 1.76 + 0.657 = 2.417 dollars   # in all" in shown
    assert "requests = 1,000 requests   # in all [plan]" in shown
    assert shown.endswith("## Answer\n2.42 dollars without cached-input prices, 1.19 with them: 51% less.\n")
    assert said == ""


def test_json_has_every_quantity_with_unit_and_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["plan", str(FOLDER / "conversation.yaml"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "conversation"
    entries = {entry.get("name"): entry for section in data["sections"] for entry in section["entries"]}
    assert entries["warm_ms"] == {
        "name": "warm_ms",
        "says": "of prefill with it",
        "value": 52.48,
        "unit": "ms",
        "formula": "warm_tokens * token_us / 1000",
        "numbers": "1640 * 32 / 1000",
    }
    assert entries["simulated_tokens"]["value"] == 1640


def test_without_simulation_only_the_arithmetic_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["plan", str(FOLDER / "conversation.yaml"), "--no-simulation"]) == 0
    shown = capsys.readouterr().out
    assert "warm_tokens" in shown
    assert "simulated_tokens" not in shown


def test_simulation_shows_its_progress_on_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (FOLDER / "online_measured.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("requests: 600", "requests: 60"))
    assert warmroute.main(["plan", str(tmp_path / "plan.yaml")]) == 0
    shown, said = capsys.readouterr()
    assert "simulated_replicas = " in shown
    assert "predicted_finish, 2 replicas: 60 requests" in said.splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.yaml: empty; expected a mapping with kind: online, long_prompts"),
        ("kind: onlin", "plan.yaml: kind is 'onlin'; expected one of online,"),
        ("title: x", "plan.yaml: kind is missing; expected one of online,"),
        ("- a", "plan.yaml: a list; expected a mapping with kind:"),
        ("kind: [", "plan.yaml: not valid YAML:"),
        (
            "kind: conversation\nsystem_tokens: 10\nuser_tokens: 1\nreply_tokens: 1\nturns: 1\nusers: 3",
            "plan.yaml: line 5: turns: expected greater than or equal to 2; got 1\n"
            "{path}: line 6: users: unknown key, is it user_tokens?",
        ),
        (
            "kind: hybrid\nreplica: {kind: roofline, model: bamba-9b, gpuu: h100, gpu: h100}\n"
            "context_tokens: 5\nturn_token: 5\nturn_tokens: 5",
            "plan.yaml: line 2: replica.gpuu: unknown key, is it gpu?\n"
            "{path}: line 4: turn_token: unknown key, is it turn_tokens?",
        ),
        (
            "kind: hybrid\nreplica: {kind: roofline, model: llama-9, gpu: h100}\n"
            "context_tokens: 5\nturn_tokens: 5",
            "plan.yaml: line 2: replica.model: unknown model; expected one of bamba-9b, ",
        ),
        (
            "kind: hybrid\nreplica: {kind: roofline, model: llama-3.1-8b, gpu: h100}\n"
            "context_tokens: 5\nturn_tokens: 5",
            "plan.yaml: replica.model llama-3.1-8b has no recurrent layers",
        ),
        (
            "kind: tiers\nreplica: {model: llama-3.1-8b, gpu: h100}",
            "plan.yaml: line 2: replica: kind is missing; expected one of roofline, measured",
        ),
        (
            "kind: online\nreplica: {kind: measured, prefill_us_per_token: 32}\ngpu_hour_dollars: 1\n"
            "traffic: {kind: numbers, requests_per_s: 1, prompt_tokens: 9, shared_tokens: 9, "
            "output_tokens: 1}",
            "plan.yaml: line 4: traffic: shared_tokens 9 of a prompt of 9: the last token is always computed",
        ),
        (
            "kind: online\nreplica: {kind: measured, prefill_us_per_token: 32}\ngpu_hour_dollars: 1\n"
            "traffic: {kind: trace, trace: gone.jsonl}",
            "plan.yaml: trace: no file 'gone.jsonl'; expected a trace file",
        ),
    ],
)
def test_a_wrong_plan_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert warmroute.main(["plan", str(path)]) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.startswith(f"warmroute plan: {path}: ")
    assert message.replace("{path}", str(path)) in said


def test_numbers_that_no_sheet_can_hold_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    online = (FOLDER / "online.yaml").read_text()
    for rate, message in (
        (".inf", "traffic.requests_per_s: expected a finite number; got inf"),
        ("1.0e+308", "traffic.requests_per_s: expected less than or equal to 1000000"),
    ):
        plan.write_text(re.sub(r"requests_per_s: \S+", f"requests_per_s: {rate}", online))
        assert warmroute.main(["plan", str(plan), "--no-simulation"]) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1


def test_a_plan_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["plan", "nowhere.yaml"]) == 2
    assert "warmroute plan: nowhere.yaml: cannot be read: " in capsys.readouterr().err


def test_help_names_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        warmroute.main(["plan", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "example: warmroute plan configs/plans/online.yaml" in shown
    assert all(kind in shown for kind in KINDS)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_gets_tables_that_cut_nothing(name: str, width: int) -> None:
    made = example(name)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_report(made, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    flat = "".join(shown.split())
    for line in made.lines():
        assert line.name in flat
    for sentence in made.answer:
        assert "".join(sentence.split()) in flat


def test_planning_brings_no_torch_and_no_network() -> None:
    code = (
        "import sys, sim.plan.plan_command\n"
        "print(sorted({'torch', 'aiohttp', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
