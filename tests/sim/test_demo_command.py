"""``warmroute demo`` for real, with tiny replicas: it finishes, reports, and leaves nothing running."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sim.demo.processes import ROOT

pytest.importorskip("torch", reason="the extra [replica] is not installed")

SMALL = (
    "--model",
    "tiny",
    "--conversations",
    "4",
    "--turns",
    "2",
    "--reply-tokens",
    "3",
    "--kv-tokens",
    "32768",
)


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The demo with its configs in ``folder``, so that its children are known by their arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "warmroute", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )


def left_over(folder: Path, name: str = "") -> list[int]:
    """Processes that still run with a config in ``folder`` whose name holds ``name``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            arguments = path.read_bytes().decode("utf-8", "replace").split("\0")
            if any(text.startswith(str(folder)) and name in text for text in arguments[3:]):
                found.append(int(path.parent.name))
    return found


def test_it_plays_the_script_under_both_policies(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, *SMALL, "--json", str(tmp_path / "figures.json"))
    out, err = demo.communicate(timeout=110)
    assert demo.returncode == 0, out + err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [run["policy"] for run in figures["runs"]] == ["round_robin", "predicted_finish"]
    for run in figures["runs"]:
        assert (run["requests"], run["errors"]) == (8, 0)
        assert run["prompt_tokens"] > 8 * 2_500
        assert 0.0 < run["cached_share"] < 1.0
        assert run["ttft_s"]["p50"] > 0.0
    # Round robin sends a second turn where its first was only by chance; the other keeps them together:
    # four of eight prompts are almost wholly cached, that of a second conversation with one prompt mostly.
    by_policy = {run["policy"]: run["cached_share"] for run in figures["runs"]}
    assert by_policy["predicted_finish"] >= max(0.45, by_policy["round_robin"])
    assert out.count(" 8/8 ") == 2
    assert "predicted_finish found" in out
    assert left_over(tmp_path) == []
    assert list(tmp_path.glob("warmroute-demo-*")) == []  # its folder is gone, too


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(tmp_path: Path, sig: signal.Signals) -> None:
    demo = start_demo(tmp_path, *SMALL, "--turns", "200")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "round_robin" in line and "/" in line and "->" in line:
            break  # the first answer: everything is running
    assert len(left_over(tmp_path)) >= 4
    demo.send_signal(sig)
    _, err = demo.communicate(timeout=30)
    assert demo.returncode == 130, err
    assert "interrupted" in err
    assert left_over(tmp_path) == []


def test_a_replica_that_dies_is_said_and_everything_stops(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, *SMALL, "--turns", "200")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "->" in line:
            break
    [victim] = left_over(tmp_path, "replica-2")
    os.kill(victim, signal.SIGKILL)
    _, err = demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert "replica-2 ended with exit code -9" in err
    assert "The end of" in err
    deadline = time.monotonic() + 5.0
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_over(tmp_path) == []


def test_a_model_that_is_not_there_is_said(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--model", str(tmp_path / "no-such.gguf"))
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "ended with exit code" in err
    assert "no-such.gguf" in err
    assert "Traceback" not in err
    [folder] = tmp_path.glob("warmroute-demo-*")  # kept, since its logs are named in the message
    assert str(folder) in err
