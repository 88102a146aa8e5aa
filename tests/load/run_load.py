"""``make load``: tiny replicas, a router and locust's chat users for a bounded time; stops what it started.

Exit code 0 if every answer was whole, 1 if one was not or there was none.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sim.demo.local_fleet import ReplicaPlan, start_replicas, start_router
from sim.demo.processes import ChildError, ChildProcesses

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
ROOT = Path(__file__).resolve().parents[2]
STOP_S = 30


def run_locust(url: str, users: int, seconds: int) -> int:
    """Headless locust against ``url``; its table goes to the terminal. Its exit code."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--headless"),
            *("--users", str(users), "--spawn-rate", str(max(1, users // 4)), "--run-time", f"{seconds}s"),
            *("--stop-timeout", str(STOP_S), "--only-summary"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=seconds + STOP_S + 60,
        check=False,
    ).returncode


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=12, help="(default %(default)s)")
    parser.add_argument("--seconds", type=int, default=20, help="(default %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--model", default="tiny", help="(default %(default)s)")
    parser.add_argument("--policy", default="predicted_finish", help="(default %(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("LOAD_MODEL", args.model)
    with tempfile.TemporaryDirectory(prefix="warmroute-load-") as name:
        folder = Path(name)
        with ChildProcesses(folder) as children:

            async def start() -> str:
                plan = ReplicaPlan(args.model, kv_tokens=16_384, step_tokens=512, threads=1)
                replicas = await start_replicas(children, folder, args.replicas, plan, print)
                return (await start_router(children, folder, replicas, args.policy)).url

            try:
                url = asyncio.run(start())
                code = run_locust(url, args.users, args.seconds)
                children.check()
            except ChildError as error:
                print(f"load: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130
            return code


if __name__ == "__main__":
    sys.exit(main())
