"""CPU time of a process and all its children, from Linux's /proc. To one clock tick, 10 ms."""

import os
from pathlib import Path

NO_PROC = "CPU times are read from /proc, which only Linux has"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def available() -> bool:
    """This system tells what is needed."""
    return Path("/proc/self/task").is_dir()


def process_tree(pid: int) -> list[int]:
    """``pid`` and its descendants that live."""
    tree = [pid]
    for process in tree:  # grows meanwhile
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                tree += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue  # it ended just now
    return tree


def cpu_s(pid: int) -> float:
    """Seconds of CPU, user and system, that ``pid`` and its descendants used, those that ended included."""
    ticks = 0
    for process in process_tree(pid):
        try:
            text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of children that were waited for
    return ticks / TICKS_PER_S
