"""``python -m tests.replica.memory_slope``: B094 in full: does an engine grow with what it has served?

200,000 short requests on the tiny model, of which CI serves a few hundred (``test_memory_growth``): resident
memory at half of them and at the end, and the slope in between. Ends with 1 above ``MOST_BYTES``.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

from tests.replica.models import greedy_request, make_engine

MOST_BYTES = 2.0
"""A request; a leak of one small object would be 50 or more."""
AT_ONCE = 32


def resident_bytes() -> int:
    """Of this process, after a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Serve, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=200_000)
    count = parser.parse_args().requests
    engine = make_engine(kv_blocks=30, max_running=AT_ONCE, record_events=True)
    began_s, half, served = time.monotonic(), 0, 0
    while served < count:
        for _ in range(AT_ONCE):
            prompt = [(7 * served + at * served) % 256 for at in range(4 + served % 30)]
            engine.add(greedy_request(f"{served}", prompt, 1 + served % 2))
            served += 1
        while engine.has_work:
            engine.step()
            engine.take_events()
        if not half and served >= count // 2:
            half = resident_bytes()
    slope = (resident_bytes() - half) / (count / 2)
    print(
        f"{served} requests in {time.monotonic() - began_s:.0f} s: {half / 2**20:.1f} MiB at half, "
        f"{slope:+.2f} bytes a request since"
    )
    return 0 if slope <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
