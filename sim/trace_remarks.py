"""What reading a trace had to change or found strange, told to whoever asked for it."""

import sys

from sim.workload.trace import Trace


def tell_remarks(trace: Trace) -> None:
    """One line each on standard error, which leaves ``--json`` alone."""
    for remark in trace.remarks:
        print(f"warmroute: {trace.name}: {remark}", file=sys.stderr)
