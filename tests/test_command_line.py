"""The command line: every command has help; wrong arguments and configs end with 2 and a helpful message."""

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
import yaml

import warmroute
from router.config import PolicyKind, parse_config
from router.config_errors import ConfigError
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.power_of_two import PowerOfTwo
from router.routing.policies.prefix_affinity import PrefixAffinity
from router.serve_command import DEFAULT_MEASURE, DEFAULT_PRICE, reloaded_config
from warmroute import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
MINIMAL = "replicas:\n  - url: http://127.0.0.1:8000\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command line, run in this process."""
    try:
        code = main(arguments)
    except SystemExit as ended:  # argparse
        assert isinstance(ended.code, int)
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


def config_file(folder: Path, text: str) -> str:
    path = folder / "router.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("request_body", "says"), [("[]", "not a JSON object"), ('{"model": "m"}', "no prompt found")]
)
def test_what_cannot_be_explained_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request_body: str, says: str
) -> None:
    request = tmp_path / "request.json"
    request.write_text(request_body)
    code, _, err = run(capsys, "explain", config_file(tmp_path, MINIMAL), str(request))
    assert code == 2 and f"{request}: " in err and says in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"example: warmroute {command}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "warmroute: the following arguments are required: COMMAND; see warmroute --help\n"),
        (["top"], "warmroute top: the following arguments are required: --url; see warmroute top --help\n"),
        (["serve", "--foo"], "warmroute serve: unrecognized arguments: --foo; see warmroute serve --help\n"),
        (
            ["bench", "engine", "--threads", "x"],
            "warmroute bench engine: argument --threads: 'x'; expected a whole number, 1 or more; "
            "see warmroute bench engine --help\n",
        ),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run(capsys, *arguments) == (2, "", says)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)


def test_no_help_and_no_routing_command_imports_torch() -> None:
    commands = list(COMMANDS)
    ran = run_python(
        "import sys, contextlib, io, warmroute\n"
        f"for command in {commands!r}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        warmroute.main([command, '--help'])\n"
        "import router.proxy.assembly, sim.demo.demo_command, sim.replay_command, sim.simulate_command\n"
        "print('torch' in sys.modules)"
    )
    assert ran.stdout.strip() == "False", ran.stderr


def test_what_is_compiled_in_place_is_found_by_an_editable_install(tmp_path: Path) -> None:
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['ROOT'] in sys.path)"
    command = [sys.executable, "-P", "-I", "-c", code, str(Path(warmroute.__file__))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "warmroute", "serve", "--replica", "http://127.0.0.1:1", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert yaml.safe_load(ran.stdout)["replicas"][0]["url"] == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ("COMMAND",)),
        (("fly",), ("fly", "serve")),
        (("serve", "--no-such-flag"), ("--no-such-flag",)),
        (("serve",), ("CONFIG.yaml", "--replica")),
        (("serve", "--replica", "127.0.0.1:8000"), ("http://HOST:PORT", "127.0.0.1:8000")),
        (("serve", "--replica", "http://a:1/v1"), ("without a path", "http://a:1/v1")),
        (("serve", "--replica", "http://a:1", "--listen", "nowhere"), ("listen", "HOST:PORT", "nowhere")),
        (("serve", "--replica", "http://a:1", "--policy", "magic"), ("policy.kind", "round_robin", "magic")),
        (("serve", "--replica", "http://a:1", "--replica", "http://a:1"), ("must differ", "a:1")),
        (("serve", "/no/such/router.yaml"), ("/no/such/router.yaml", "cannot be read")),
        (("explain", "/no/such/request.json", "--url", "http://a:1"), ("/no/such/request.json",)),
        (("demo", "--policies", "round_robin,magic"), ("--policies", "magic", "predicted_finish")),
        (("demo", "--policies", "round_robin,round_robin"), ("--policies", "different")),
        (("demo", "--conversations", "0"), ("--conversations", "1 or more")),
        (("demo", "--turns", "many"), ("--turns", "whole number")),
        (("demo", "--json", "/no/such/folder/file.json"), ("--json", "folder does not exist")),
        (("replay", "--trace", "x"), ("--url",)),
        (("replay", "--url", "127.0.0.1:80"), ("--url", "http://HOST:PORT")),
        (("replay", "--url", "http://a:1", "--trace", "/no/such/trace"), ("/no/such/trace",)),
        (("simulate", "--trace", "/no/such/trace"), ("/no/such/trace",)),
        (("simulate", "--policy", "magic"), ("magic", "predicted_finish")),
        (("simulate", "--replicas", "0"), ("--replicas", "1 or more")),
        (("replica", "/no/such/replica.yaml"), ("/no/such/replica.yaml",)),
        (("replica", "--model", "tiny", "--listen", "nowhere"), ("listen", "HOST:PORT", "nowhere")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_wrong_arguments_end_with_2_and_say_what_was_expected(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], expected: Sequence[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for text in expected:
        assert text in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("empty", "replicas")),
        ("- a list\n", ("mapping", "list")),
        ("replicas: [\n", ("not valid YAML",)),
        ("listen: 127.0.0.1:8080\n", ("replicas",)),
        ("replicas: []\n", ("replicas", "at least 1")),
        (MINIMAL + "polcy:\n  kind: round_robin\n", ("polcy", "unknown key")),
        (MINIMAL + "slo:\n  ttft: 5\n", ("slo.ttft", "unknown key")),
        (MINIMAL + "slo:\n  ttft_ms: -5\n", ("slo.ttft_ms", "greater than 0", "-5")),
        (MINIMAL + "timeouts:\n  connect_s: soon\n", ("timeouts.connect_s", "number", "soon")),
        (MINIMAL + "policy:\n  kind: round_robin\n  price: 2\n", ("price", "prefix_affinity")),
        (MINIMAL + "listen: 127.0.0.1:1\nadmin: 127.0.0.1:1\n", ("listen and admin",)),
        ("replicas:\n  - url: ftp://a\n", ("replicas.0.url", "http://HOST:PORT", "ftp://a")),
        ("replicas:\n  - url: http://user:secret@a:1\n", ("replicas.0.url", "api_key")),
        (
            "replicas:\n  - {url: 'http://a:1', name: x}\n  - {url: 'http://b:1', name: x}\n",
            ("must differ", "twice: x"),
        ),
    ],
)
def test_wrong_configs_end_with_2_and_name_file_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: Sequence[str]
) -> None:
    path = config_file(tmp_path, text)
    code, out, err = run(capsys, "serve", path, "--check")
    assert code == 2
    assert out == ""
    assert path in err
    for part in expected:
        assert part in err


def test_every_wrong_key_is_named_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = config_file(tmp_path, MINIMAL + "polcy: 1\nslo:\n  ttft_ms: 0\nlimits:\n  body: 3\n")
    _, _, err = run(capsys, "serve", path, "--check")
    assert all(key in err for key in ("polcy", "slo.ttft_ms", "limits.body"))


def test_check_prints_the_effective_config_with_secrets_masked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = config_file(tmp_path, MINIMAL + "api_key: sk-very-secret\nslo:\n  ttft_ms: 250\n")
    code, out, err = run(capsys, "serve", path, "--check", "--policy", "round_robin", "--listen", "0.0.0.0:1")
    assert (code, err) == (0, "")
    assert "sk-very-secret" not in out
    shown = yaml.safe_load(out)
    assert shown["api_key"] and set(shown["api_key"]) == {"*"}
    assert shown["slo"]["ttft_ms"] == 250
    assert shown["policy"]["kind"] == "round_robin"  # flags win over the file
    assert shown["listen"] == "0.0.0.0:1"
    assert shown["admin"] == "127.0.0.1:8081"  # defaults are shown, too
    assert parse_config(shown, "what --check printed").slo.ttft_ms == 250


@pytest.mark.parametrize(
    ("keys", "printed"),
    [
        ("cost: {gpu: h100}", ("  #   prefill_us_per_token: 62.5\n", "  gpu: h100\n")),
        ("policy: {kind: prefix_affinity}", ("  #   attention_tokens: 64000\n", "  price: 1.0\n")),
        ("policy: {kind: least_loaded}", ("  #   decode_step_ms: 8\n", "measure: outstanding_tokens")),
        ("cost: {decode_step_ms: 9}", ("  decode_step_ms: 9.0\n", "  prefill_fixed_ms: 4.0\n")),
    ],
)
def test_check_prints_what_is_in_force_and_can_be_read_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: str, printed: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, "serve", config_file(tmp_path, f"{MINIMAL}{keys}\n"), "--check")
    assert code == 0
    for text in printed:
        assert text in out
    again = parse_config(yaml.safe_load(out), "what --check printed")
    given = parse_config(yaml.safe_load(MINIMAL + keys), "x")
    assert again.cost.hardware == given.cost.hardware and again.cost.decode == given.cost.decode
    assert again.policy.kind == given.policy.kind


def test_the_defaults_that_check_prints_are_the_policies_own() -> None:
    rng = random.Random(1)
    assert PrefixAffinity(rng)._price == DEFAULT_PRICE
    assert LeastLoaded(rng)._measure == PowerOfTwo(rng)._measure == DEFAULT_MEASURE


def test_help_names_every_policy() -> None:
    assert get_args(PolicyKind) == warmroute._POLICIES


def test_a_reload_says_that_the_file_is_gone(tmp_path: Path) -> None:
    gone = argparse.Namespace(config=str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"gone\.yaml: cannot be read again: there is no such file"):
        reloaded_config(gone)


def test_secrets_are_not_in_messages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = config_file(tmp_path, MINIMAL + "api_key: sk-very-secret\npolcy: 1\n")
    _, _, err = run(capsys, "serve", path, "--check")
    assert "sk-very-secret" not in err


def test_a_replica_that_cannot_start_says_why_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "replica", "--model", "nope", "--listen", "127.0.0.1:0")
    assert (code, out) == (2, "")
    assert err.startswith("warmroute replica: ") and "nope" in err
    assert len(err.splitlines()) == 1


def test_a_taken_port_is_said(tmp_path: Path) -> None:
    ran = run_python(
        "import socket, sys, warmroute\n"
        "taken = socket.socket(); taken.bind(('127.0.0.1', 0)); taken.listen()\n"
        "port = taken.getsockname()[1]\n"
        "sys.exit(warmroute.main(['serve', '--listen', f'127.0.0.1:{port}', '--admin', '127.0.0.1:0',\n"
        "         '--replica', 'http://127.0.0.1:1']))"
    )
    assert ran.returncode == 1
    assert "cannot listen" in ran.stderr
    assert "Traceback" not in ran.stderr
