"""``make chaos``: kill, freeze and break replicas behind a real router, and check what its clients see.

Three replica processes, a ``warmroute serve`` process, and clients that know every right answer. Exit code 0
if every request had an outcome, none a wrong one, and the router's counters are zero at the end; else 1.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import uvloop
import yaml
from rich.console import Console
from rich.table import Table

from sim.demo.processes import Child, ChildError, ChildProcesses, free_ports, warmroute
from tests.chaos.clients import VIOLATIONS, Outcome, Report, client

REPLICAS = 3
START_LIMIT_S = 30.0
REST_LIMIT_S = 20.0
ZERO_GAUGES = ("in_flight", "client_connections", "replica_queued", "replica_decoding", "replica_held")
ZERO_IN_FLEET = ("held", "queued", "decoding", "outstanding_tokens")


class Replica:
    """One replica process, started again and again on its port."""

    def __init__(self, name: str, port: int, faults: float, children: ChildProcesses) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._faults = faults
        self._children = children
        self._lives = 0
        self.child: Child | None = None

    async def start(self) -> None:
        """Start it and wait until it answers."""
        self._lives += 1
        arguments = ("--port", str(self._port), "--faults", str(self._faults), "--seed", str(self._lives))
        command = [sys.executable, "-m", "tests.chaos.faulty_replica", *arguments]
        self.child = self._children.start(f"{self.name}-life-{self._lives}", command)
        await self._children.wait_ready(self.child, self.url + "/health", START_LIMIT_S)

    def signal(self, what: signal.Signals) -> None:
        """Send it a signal."""
        assert self.child is not None
        self.child.signal_group(what)


async def torment(replicas: list[Replica], rng: random.Random, deeds: Counter[str]) -> None:
    """Until cancelled: kill and restart, or freeze and thaw, one replica at a time or two."""

    async def kill(replica: Replica) -> None:
        deeds["kill -9 and restart"] += 1
        replica.signal(signal.SIGKILL)
        await asyncio.sleep(rng.random() * 1.5)
        await replica.start()

    async def freeze(replica: Replica) -> None:
        deeds["SIGSTOP and SIGCONT"] += 1
        replica.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.random() * 4.0)
        finally:
            replica.signal(signal.SIGCONT)

    while True:
        await asyncio.sleep(rng.random() * 1.5)
        victims = rng.sample(replicas, rng.choice([1, 1, 2]))
        await asyncio.gather(*(rng.choice([kill, freeze])(victim) for victim in victims))


def router_config(replicas: list[Replica], listen: str, admin: str, policy: str) -> str:
    """Short limits, so that two minutes see all of them."""
    return yaml.safe_dump(
        {
            "listen": listen,
            "admin": admin,
            "replicas": [{"url": replica.url, "name": replica.name} for replica in replicas],
            "policy": {"kind": policy},
            "timeouts": {"connect_s": 1.0, "first_byte_s": 3.0, "idle_s": 2.5},
            "health": {"interval_s": 0.5, "timeout_s": 0.5, "backoff_s": 0.2, "max_backoff_s": 1.0},
            "hold": {"max_wait_s": 10.0},
        }
    )


async def unreleased(admin_url: str) -> list[str]:
    """What the router still books, once it has had time to settle; empty if nothing."""
    deadline = time.monotonic() + REST_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(admin_url + "/fleet") as answer:
                fleet = await answer.json()
            async with session.get(admin_url + "/metrics") as answer:
                page = await answer.text()
            left = [
                f"/fleet: {replica['name']} {name} = {replica[name]}"
                for replica in fleet["replicas"]
                for name in ZERO_IN_FLEET
                if replica[name]
            ]
            left += [
                f"/metrics: {line}"
                for line in page.splitlines()
                if line.startswith(tuple(f"warmroute_{name}" for name in ZERO_GAUGES))
                and not line.endswith(" 0.0")
            ]
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.2)


async def run(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """The whole run; its exit code."""
    rng = random.Random(args.seed)
    report, deeds, stop = Report(), Counter[str](), asyncio.Event()
    *ports, public, admin = free_ports(REPLICAS + 2)
    with ChildProcesses(folder) as children:
        replicas = [Replica(f"r{at}", port, args.faults, children) for at, port in enumerate(ports)]
        await asyncio.gather(*(replica.start() for replica in replicas))
        listen, admin_address = f"127.0.0.1:{public}", f"127.0.0.1:{admin}"
        config = folder / "router.yaml"
        config.write_text(router_config(replicas, listen, admin_address, args.policy))
        router = children.start("router", warmroute("serve", str(config)))
        await children.wait_ready(router, f"http://{listen}/readiness", START_LIMIT_S)
        console.print(f"{REPLICAS} replicas, {args.clients} clients, {args.seconds} s, seed {args.seed}")
        clients = [
            asyncio.create_task(client(number, listen, report, random.Random(rng.random()), stop))
            for number in range(args.clients)
        ]
        tormenting = asyncio.create_task(torment(replicas, rng, deeds))
        done, _ = await asyncio.wait([tormenting], timeout=args.seconds)
        stop.set()
        tormenting.cancel()
        await asyncio.gather(*clients)
        for task in done:
            task.result()  # it never ends but by a fault
        left = await unreleased(f"http://{admin_address}")
        if router.exit_code is not None:
            raise router.died()
        faults = [
            line for line in router.log.read_text().splitlines() if "Traceback" in line or " ERROR " in line
        ]
    print_report(report, deeds, left, faults, console)
    violated = any(report.outcomes[outcome] for outcome in VIOLATIONS) or left or faults
    return 1 if violated or not report.outcomes[Outcome.RIGHT] else 0


def print_report(
    report: Report, deeds: Counter[str], left: list[str], faults: list[str], console: Console
) -> None:
    """The table, and every violation in words."""
    table = Table("what happened", "count")
    for deed, count in sorted(deeds.items()):
        table.add_row(deed, f"{count:,}")
    for outcome in Outcome:
        table.add_row(str(outcome), f"{report.outcomes[outcome]:,}", end_section=outcome is Outcome.NONE)
    table.add_row(
        "statuses", ", ".join(f"{status}: {count:,}" for status, count in sorted(report.statuses.items()))
    )
    table.add_row("booked at the end", "; ".join(left) or "nothing")
    table.add_row("faults in the router's log", f"{len(faults)}")
    console.print(table)
    for violation in [*report.violations, *faults[:5]]:
        console.print(violation, markup=False, style="red")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="(default %(default)s)")
    parser.add_argument("--clients", type=int, default=200, help="(default %(default)s)")
    parser.add_argument(
        "--faults", type=float, default=0.15, help="share of broken answers (default %(default)s)"
    )
    parser.add_argument("--policy", default="predicted_finish", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmroute-chaos-") as folder:
        try:
            return uvloop.run(run(Path(folder), args, Console()))
        except ChildError as error:
            print(f"chaos: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
