"""``make soak``: what only shows over time or in numbers. Exit code 1 if a limit is passed.

``memory``   resident memory over 200,000 requests with unique prompts
``streams``  5,000 streams open at once, 10,000 sockets in one router process
``stalls``   how long prompts of up to a megabyte hold the event loop
"""

import argparse
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console

from sim.demo.processes import ChildError
from tests.load.memory_soak import memory_soak
from tests.load.stall_soak import stall_soak
from tests.load.stream_soak import stream_soak

RUNS = {"memory": memory_soak, "streams": stream_soak, "stalls": stall_soak}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="memory, streams, stalls (default: all three)")
    parser.add_argument("--requests", type=int, default=200_000, help="memory (default %(default)s)")
    parser.add_argument("--prompt-bytes", type=int, default=2_000, help="memory (default %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="memory: connections (default %(default)s)")
    parser.add_argument("--streams", type=int, default=5_000, help="streams (default %(default)s)")
    parser.add_argument(
        "--hold-s", type=float, default=25.0, help="streams: open for so long (default %(default)s)"
    )
    parser.add_argument(
        "--limit-kib", type=float, default=40.0, help="streams: memory of each (default %(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=200, help="stalls: of each size (default %(default)s)")
    parser.add_argument(
        "--limit-ms", type=float, default=5.0, help="stalls: at a megabyte (default %(default)s)"
    )
    args = parser.parse_args()
    unknown = [name for name in args.runs if name not in RUNS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected {', '.join(RUNS)}")
    console, code = Console(), 0
    for name in args.runs or RUNS:
        with tempfile.TemporaryDirectory(prefix="warmroute-soak-") as folder:
            try:
                code |= uvloop.run(RUNS[name](Path(folder), args, console))
            except (ChildError, OSError) as error:
                print(f"soak {name}: {error}", file=sys.stderr)
                code = 1
            except KeyboardInterrupt:
                return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
