"""What is freed stays with the process: the next long body costs no page faults."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from router.proxy.freed_memory import keep_freed_memory
assert keep_freed_memory() or sys.argv[1] == "without"
def round():
    bodies = [bytes(300_000) for _ in range(8)]
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    program = FAULTS if how == "with" else FAULTS.replace("assert keep_freed_memory()", "assert False")
    done = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_long_bodies_one_after_the_other_cost_no_pages() -> None:
    assert faults("with") < 20 < 1_000 < faults("without")
