"""Large pages: asked for once, where the kernel gives them to those who ask, and by the command alone."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replica.server import huge_pages
from replica.server.huge_pages import TUNABLES, with_huge_pages

PROGRAM = """
import os, sys
sys.argv = ["warmroute", sys.argv[1], "given.yaml"]
from pathlib import Path
from replica.server.huge_pages import begin_with_huge_pages
print("began", flush=True)
begin_with_huge_pages(Path(os.environ["MODES"]))
print(os.environ.get("GLIBC_TUNABLES"), os.getpid())
"""


def test_doctests() -> None:
    assert doctest.testmod(huge_pages) == (0, 3)


def test_what_the_operator_says_of_other_tunables_stays() -> None:
    given = {TUNABLES: "glibc.malloc.check=0", "OTHER": "1"}
    assert with_huge_pages(given, "always [madvise] never") == given | {
        TUNABLES: "glibc.malloc.check=0:glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
    }
    given = {TUNABLES: "glibc.malloc.arena_max=4"}
    assert with_huge_pages(given, "always [madvise] never") == {
        TUNABLES: "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=1"
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own words")
@pytest.mark.parametrize(
    ("command", "modes", "begins", "tunables"),
    [
        ("replica", "always [madvise] never", 2, "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"),
        ("replica", "always madvise [never]", 1, "None"),
        ("replica", None, 1, "None"),
        ("tests/replica", "always [madvise] never", 1, "None"),
    ],
)
def test_the_command_begins_anew_once(
    command: str, modes: str | None, begins: int, tunables: str, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    if modes is not None:
        file.write_text(modes)
    environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command],
        env=environment | {"MODES": str(file), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = process.stdout.read().split("\n")
    assert process.returncode == 0
    assert lines == ["began"] * begins + [f"{tunables} {process.pid}", ""]
