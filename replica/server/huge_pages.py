"""Weights in pages of 2 MiB: a step reads all of them, and looks each page's address up.

Decode of SmolLM2-135M at 8 in bf16, one core of a Zen 4: 32.6 ms a step, with pages of 4 KiB 37.8. glibc asks
the kernel for such pages if a tunable says so that it reads before the program begins; so it begins anew.
Then all threads share one arena: that of the engine's thread alone gives memory back to the kernel and takes
it again in one and the same step (40 to 60 ms of a cold prompt of 1,001 tokens, 13 with one arena).
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES = "glibc.malloc.hugetlb"
ARENAS = "glibc.malloc.arena_max"
MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def begin_with_huge_pages(modes: Path = MODES) -> None:
    """Start the program of this process anew; returns where that changes nothing or is not wanted.

    ``modes``: where the kernel says who gets such pages. Only a process that was started as ``warmroute
    replica`` starts anew, none that calls its code.
    """
    if sys.argv[1:2] != ["replica"] or not sys.executable:
        return
    try:
        environment = with_huge_pages(os.environ, modes.read_text(encoding="ascii"))
        if environment is not None:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError:
        return  # no Linux, or one that lets us do neither: small pages serve, too


def with_huge_pages(environment: Mapping[str, str], modes: str) -> dict[str, str] | None:
    """``environment`` with the tunable; None: nobody or everybody gets them, or the operator has spoken.

    >>> with_huge_pages({}, "always [madvise] never")
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1'}
    >>> with_huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "always [madvise] never") is None
    True
    >>> with_huge_pages({}, "[always] madvise never") is None
    True
    """
    given = environment.get(TUNABLES, "")
    if "[madvise]" not in modes or HUGE_PAGES in given:
        return None
    wanted = [f"{HUGE_PAGES}=1"] + [f"{ARENAS}=1"] * (ARENAS not in given)
    return {**environment, TUNABLES: ":".join([*filter(None, [given]), *wanted])}
