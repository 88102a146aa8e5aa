"""How much slower requests get while Redis is frozen: two router processes, one fake replica, real sockets.

::

    python -m tests.state.run_frozen_redis --seconds 30

Prints time to the whole answer, in milliseconds, before, while and after Redis is stopped by SIGSTOP.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from tests.fakes.router_process import RouterProcess
from tests.state.test_routers_over_http import Site, with_site

EVERY_S = 0.005


async def latencies_ms(router: RouterProcess, seconds: float) -> list[float]:
    """One request after the other, 200 a second at most."""
    found, stop = [], time.monotonic() + seconds
    while time.monotonic() < stop:
        began = time.perf_counter()
        answer = await router.ask()
        assert answer.status == 200
        found.append(1_000.0 * (time.perf_counter() - began))
        await asyncio.sleep(EVERY_S)
    return sorted(found)


def row(phase: str, values: list[float]) -> str:
    """One line of the table."""
    shown = (values[int(len(values) * share)] for share in (0.5, 0.99, 0.999))
    return f"{phase:<8} {len(values):>6} " + " ".join(f"{one:>8.2f}" for one in (*shown, values[-1]))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase (default %(default)s)")
    seconds = parser.parse_args().seconds

    async def scenario(site: Site) -> None:
        one = await site.start_router()
        await site.start_router()
        await site.all_sharing()
        print(f"{'':<8} {'n':>6} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8}")
        print(row("before", await latencies_ms(one, seconds)), flush=True)
        site.server.freeze()
        print(row("frozen", await latencies_ms(one, seconds)), flush=True)
        site.server.thaw()
        thawed_at = time.monotonic()
        await site.all_sharing()
        print(f"sharing again {time.monotonic() - thawed_at:.1f} s after the thaw")
        print(row("after", await latencies_ms(one, seconds)), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        with_site(Path(folder), scenario, replicas=1)


if __name__ == "__main__":
    main()
