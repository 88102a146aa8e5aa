"""How much memory processes really take: proportional set size, so that shared pages count once."""

from collections.abc import Iterable
from pathlib import Path


def memory_mib(pids: Iterable[int]) -> float | None:
    """Sum over ``pids`` in MiB: Pss where Linux tells it, else resident size; ``None`` off Linux."""
    total_kib, seen = 0, False
    for pid in pids:
        for file, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
            kib = _field_kib(Path(f"/proc/{pid}/{file}"), key)
            if kib is not None:
                total_kib, seen = total_kib + kib, True
                break
    return total_kib / 1_024.0 if seen else None


def _field_kib(path: Path, key: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    except OSError:
        return None
    return None
