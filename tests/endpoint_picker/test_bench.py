"""``warmroute bench overhead`` measures Envoy alone and with our picker: all start, answer and stop."""

import asyncio
from pathlib import Path

from sim.bench.mock_replica import serve
from sim.bench.process_cpu import process_tree
from sim.bench.routers import RIVALS, Router
from sim.bench.started_router import start_router
from sim.demo.processes import ChildProcesses, free_ports
from tests.fakes.envoy import BINARY, needs_envoy

pytestmark = needs_envoy
CONTENDERS = [(name, command) for name, program, command in RIVALS if program == "envoy"]


def test_each_answers_and_is_measured_with_its_picker(tmp_path: Path) -> None:
    assert BINARY is not None and len(CONTENDERS) == 3
    routers = [Router(name, BINARY, command) for name, command in CONTENDERS]

    async def main(children: ChildProcesses) -> list[int]:
        ports = free_ports(2)
        replicas = [asyncio.create_task(serve(port)) for port in ports]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        started = await asyncio.gather(*(start_router(one, urls, children, tmp_path) for one in routers))
        for replica in replicas:
            replica.cancel()
        return [len(process_tree(one.child.pid)) for one in started]

    with ChildProcesses(tmp_path) as children:
        assert asyncio.run(main(children)) == [1, 2, 2], "processes whose CPU counts"
