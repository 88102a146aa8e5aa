"""``make load``: tiny replicas, a router and locust's users for a bounded time; stops what it started.

``--csv`` and ``--html`` keep locust's reports; how to read them: docs/load_testing.md.

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
USER_CLASSES = {"chat": "ChatUser", "agent": "AgentUser", "rag": "RagUser"}


def _kinds(text: str) -> str:
    if not set(text.split(",")) <= set(USER_CLASSES):
        raise argparse.ArgumentTypeError(f"{text!r}; expected some of {','.join(USER_CLASSES)}")
    return text


def run_locust(url: str, args: argparse.Namespace) -> int:
    """Headless locust against ``url``; its table goes to the terminal. Its exit code."""
    users, seconds = args.users, args.seconds
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--headless"]
    command += ["--stop-timeout", str(STOP_S), "--only-summary"]
    if args.shape is None:
        command += [
            "--users",
            str(users),
            "--spawn-rate",
            str(max(1, users // 4)),
            "--run-time",
            f"{seconds}s",
        ]
    command += ["--csv", args.csv, "--csv-full-history"] if args.csv else []
    command += ["--html", args.html] if args.html else []
    command += [USER_CLASSES[kind] for kind in args.kinds.split(",")]
    shape = {} if args.shape is None else {"LOAD_SHAPE": args.shape}
    return subprocess.run(
        command,
        env={
            **os.environ,
            **shape,
            "LOAD_USERS": str(users),
            "LOAD_SECONDS": str(seconds),
            "PYTHONPATH": str(ROOT),
        },
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
    parser.add_argument("--kinds", type=_kinds, default="chat,agent,rag", help="users (default %(default)s)")
    parser.add_argument("--shape", choices=("ramp", "spike"), help="instead of the same users all the time")
    parser.add_argument("--csv", metavar="PREFIX", help="keep figures as PREFIX_stats.csv and others")
    parser.add_argument("--html", metavar="FILE", help="keep a report with charts")
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
                code = run_locust(url, args)
                children.check()
            except ChildError as error:
                print(f"load: {error}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                return 130
            return code


if __name__ == "__main__":
    sys.exit(main())
