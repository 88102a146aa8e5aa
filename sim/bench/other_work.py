"""How much of the machine other programs took while something was measured. From Linux's /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from sim.bench.process_cpu import TICKS_PER_S, available, cpu_s

IDLE_FIELDS = (3, 4)
"""Of the line ``cpu`` of /proc/stat: idle, and idle while a disk is waited for."""
TOLD_FIELDS = 8
"""What follows (guests) is contained in what comes before."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since the machine, or this process, started."""

    all_s: float
    """Of all cores."""
    idle_s: float
    own_s: float
    """Used by this process and its children."""


def cpu_times(stat: Path = Path("/proc/stat")) -> CpuTimes | None:
    """Now; ``None`` where the system does not tell."""
    if not available():
        return None
    fields = stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields[:TOLD_FIELDS]]
    idle = sum(ticks[field] for field in IDLE_FIELDS)
    return CpuTimes(sum(ticks) / TICKS_PER_S, idle / TICKS_PER_S, cpu_s(os.getpid()))


def others_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Of the time of all cores, what others used between the two; ``None`` if it is not known.

    >>> others_share(CpuTimes(100.0, 50.0, 10.0), CpuTimes(300.0, 120.0, 110.0))
    0.15
    """
    if before is None or after is None or after.all_s <= before.all_s:
        return None
    all_s = after.all_s - before.all_s
    busy_s = all_s - (after.idle_s - before.idle_s)
    return max(0.0, busy_s - (after.own_s - before.own_s)) / all_s
