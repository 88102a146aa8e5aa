"""``warmroute bench overhead``: real routers, real sockets, figures that are made of what was counted."""

import asyncio
import json
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import warmroute
from sim.bench import routers
from sim.bench.load import Answered, LoadError, Streamed, closed_loop, streams
from sim.bench.mock_replica import serve
from sim.bench.overhead import EventCost, OverheadPlan, RequestCost, RouterCost
from sim.bench.overhead_report import cost_table, ratios
from sim.bench.process_cpu import cpu_s, process_tree
from sim.bench.prompts import chat_body
from sim.bench.routers import RIVALS, find_rivals
from sim.demo.processes import ChildProcesses, free_ports
from sim.results_table import print_whole

SHORT = (
    *("--seconds", "0.3", "--rounds", "1", "--sizes", "2,32"),
    *("--connections", "4", "--streams", "6", "--events", "5", "--replicas", "2"),
)
PROGRAMS = ("nginx", "haproxy", "envoy", "sglang-router", "vllm-router", "smg")
FAKE_RIVAL = f"""#!{sys.executable}
import sys, uvloop
from sim.bench.mock_replica import serve
uvloop.run(serve(int({{port}})))
"""
"""A "router" that answers everything itself."""
FROM_FLAG = "sys.argv[sys.argv.index('--port') + 1]"
FROM_FILE = "next(line for line in open(sys.argv[3]) if ' bind ' in line).rpartition(':')[2]"
BROKEN_RIVAL = "#!/bin/sh\necho 'no such flag' >&2\nexit 3\n"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without rivals; returns an empty folder."""
    empty = tmp_path / "nothing"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(routers, "SBIN", "")
    return empty


def install(folder: Path, program: str, text: str) -> None:
    path = folder / program / "bin" / program
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def test_alone_every_column_is_printed_and_every_rival_named(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert warmroute.main(["bench", "overhead", *SHORT]) == 0
    out = capsys.readouterr().out
    for word in ("2 KiB", "32 KiB", "CPU µs", "answers/s", "event", "lost", "failed", "memory"):
        assert word in out, word
    row = next(line for line in out.splitlines() if line.strip().startswith("warmroute "))
    cells = row.split()[1:]
    assert len(cells) - cells.count("▲") == 2 * 2 + 6
    assert all(float(cell.replace(",", "")) > 0 for cell in cells[:4]), "an event may cost less than a tick"
    assert cells[-3:-1] == ["0", "0"], "no event lost, no answer failed"
    for name, program, _ in RIVALS:
        assert f"not measured: {name}: no {program} on PATH" in out
    assert "wrk was not used" in out and "'s CPU over" not in out


def test_a_rival_is_measured_and_one_that_does_not_start_is_told(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(bare, "haproxy", FAKE_RIVAL.format(port=FROM_FILE))
    install(bare, "smg", BROKEN_RIVAL)
    install(bare, "vllm-router", FAKE_RIVAL.format(port=FROM_FLAG))
    assert warmroute.main(["bench", "overhead", *SHORT, "--rivals", str(bare), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["load"] == "own" and result["rounds"] == 1
    measured = [router["router"] for router in result["routers"]]
    assert measured == [
        "warmroute",
        "haproxy round_robin",
        "vllm-router round_robin",
        "vllm-router cache_aware",
    ]
    for router in result["routers"]:
        assert [row["prompt_kib"] for row in router["requests"]] == [2, 32]
        assert all(row["answers_per_s"] > 0 and row["failed"] == 0 for row in router["requests"])
        assert router["event"]["lost"] == 0 and router["memory_mib"] > 1
    assert set(result["cpu_ratio"]) == set(measured[1:])
    why = {one["router"]: one["why"] for one in result["not_measured"]}
    assert "no such flag" in why["smg cache_aware"] and "exit code 3" in why["smg cache_aware"]
    assert why["sglang-router cache_aware"] == f"no sglang-router in {bare} or on PATH"


def test_a_folder_that_is_none_is_an_argument_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        warmroute.main(["bench", "overhead", "--rivals", "no-such-folder"])
    assert stopped.value.code == 2
    assert "no-such-folder" in capsys.readouterr().err


def test_programs_are_found_as_environments_or_files_and_on_path(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(bare, "sglang-router", BROKEN_RIVAL)
    (bare / "smg").write_text(BROKEN_RIVAL, encoding="utf-8")
    (bare / "smg").chmod(0o755)
    (bare / "vllm-router").write_text("not executable", encoding="utf-8")
    on_path = tmp_path / "path"
    install(on_path, "nginx", BROKEN_RIVAL)
    monkeypatch.setenv("PATH", str(on_path / "nginx" / "bin"))
    found, absent = find_rivals(bare)
    assert [router.name for router in found] == [
        "nginx round_robin",
        "sglang-router round_robin",
        "sglang-router cache_aware",
        "smg cache_aware",
    ]
    assert {one.name.split()[0] for one in absent} == {"haproxy", "envoy", "vllm-router"}
    assert {name.split()[0] for name, _, _ in RIVALS} == set(PROGRAMS)


@pytest.mark.parametrize("size_kib", [1, 2, 32, 256])
def test_bodies_have_their_size_and_differ(size_kib: int) -> None:
    one, other = (chat_body(number, size_kib, 16, stream=True) for number in (1, 2))
    assert len(one) == len(other) == size_kib * 1024 and one != other
    assert json.loads(one)["stream"] is True


def test_the_load_counts_what_comes_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (nobody,) = free_ports(1)

    async def scenario() -> tuple[Answered, Streamed]:
        server = asyncio.create_task(serve(port))
        try:
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    break
                except OSError:
                    await asyncio.sleep(0.01)
            writer.close()
            answered = await closed_loop(port, [chat_body(1, 2, 16, stream=False)], 3, 0.1, tmp_path)
            streamed = await streams(port, [chat_body(1, 2, 7, stream=True)], 5, 8)
            with pytest.raises(LoadError, match=str(nobody)):
                await closed_loop(nobody, [b"{}"], 1, 0.1, tmp_path)
            return answered, streamed
        finally:
            server.cancel()

    answered, streamed = asyncio.run(scenario())
    assert answered.answers >= 3 and answered.failed == 0 and answered.wall_s >= 0.1
    assert (streamed.events, streamed.lost) == (5 * 7, 5 * 1), "asked for 8 of each, the body said 7"


def test_cpu_of_children_counts(tmp_path: Path) -> None:
    burn = "while True: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with ChildProcesses(tmp_path) as children:
        child = children.start("parent", [sys.executable, "-c", code])
        deadline = time.monotonic() + 20.0
        while cpu_s(child.pid) < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(process_tree(child.pid)) == 2
    assert cpu_s(child.pid) == 0.0, "nothing is left to count"


def test_ratios_leave_out_what_a_rival_did_not_do() -> None:
    def cost(name: str, cpu_us: float, failed: int, event_us: float, lost: int) -> RouterCost:
        return RouterCost(name, {2: RequestCost(cpu_us, 1e4, failed)}, EventCost(event_us, lost), 50.0)

    ours = cost(routers.OURS, 40.0, 0, 10.0, 0)
    against = ratios(
        [ours, cost("a", 80.0, 0, 20.0, 0), cost("b", 80.0, 3, 20.0, 1), cost("c", 0.0, 0, 5.0, 0)]
    )
    assert against == {"a": {"2 KiB": 0.5, "event": 0.5}, "b": {}, "c": {"event": 2.0}}


def test_no_figure_is_cut_off_by_a_narrow_terminal() -> None:
    long = "envoy endpoint-picker, bodies in pieces"
    sizes = {size: RequestCost(12_345.0, 67_890.0, 0) for size in OverheadPlan().sizes_kib}
    console = Console(file=StringIO(), width=60, highlight=False)
    print_whole(console, cost_table([RouterCost(long, sizes, EventCost(106.5, 0), 50.0)], OverheadPlan()))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown and long in shown and shown.count("12,345") == len(sizes)
    assert console.width == 60
