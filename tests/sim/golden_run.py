"""The golden run: a small simulation whose result is kept, to the byte.

Rewrite it after a change of routing, scheduling or caching that is meant to change results::

    python -m tests.sim.golden_run
"""

from pathlib import Path

import orjson

from sim.simulate import simulate
from sim.workload.sources import open_trace

GOLDEN_FILE = Path(__file__).parent / "golden_run.json"
POLICIES = ("round_robin", "power_of_two", "prefix_affinity", "predicted_finish")


def golden_run() -> bytes:
    """Four policies on 400 requests, as JSON."""
    results = simulate(open_trace("mooncake", requests=400), POLICIES, replicas=4, rate=1.0, seed=7)
    rows = [result.json_object() for result in results]
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


if __name__ == "__main__":
    GOLDEN_FILE.write_bytes(golden_run())
