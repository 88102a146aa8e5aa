"""What requests notice of a frozen Redis. Two measurements, each told apart from what else the machine does.

::

    python -m tests.state.run_frozen_redis --seconds 30

Over HTTP: two router processes that share, and beside them one without Redis, before one fake replica. Each
request to the first is paired with one to the lone router, in random order: the machine delays both alike,
and only what is more on one side is Redis'. In one process: two routers' state without sockets, and the
processor time of every turn of their event loop: a request that is due meanwhile waits for its end, and no
longer.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from tests.fakes.proxy_rig import CHAT
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import RedisServer
from tests.state.loop_turns import quantiles, turns_ms
from tests.state.members import Members, until, with_redis
from tests.state.test_routers_over_http import Site, with_site

EVERY_S = 0.01
LATE_MS = 5.0
HEADS = f"{'':<18} {'n':>6} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8}"


async def answer_ms(client: RawClient) -> float:
    """One request on a connection that is kept."""
    began = time.perf_counter()
    await client.post(CHAT)
    assert (await client.answer()).status == 200
    return 1e3 * (time.perf_counter() - began)


async def pairs_ms(shared: RawClient, alone: RawClient, seconds: float) -> tuple[list[float], list[float]]:
    """Time to the whole answer through either, pair by pair, 100 pairs a second at most."""
    found: tuple[list[float], list[float]] = ([], [])
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        sides = [(shared, found[0]), (alone, found[1])]
        random.shuffle(sides)
        for client, values in sides:
            values.append(await answer_ms(client))
        await asyncio.sleep(EVERY_S)
    return found


def tell(phase: str, shared: list[float], alone: list[float]) -> None:
    """Both rows of one phase, and by how much the pairs differ."""
    for name, values in (("shared", shared), ("without Redis", alone)):
        print(f"{phase if name == 'shared' else '':<7} {name:<10} {len(values):>6} {quantiles(values)}")
    later = [one - other for one, other in zip(shared, alone, strict=True)]
    more, less = (sum(sign * one > LATE_MS for one in later) for sign in (1, -1))
    print(f"{'':<7} over {LATE_MS:g} ms later than its pair: shared {more}, without Redis {less}", flush=True)


async def over_http(site: Site, seconds: float) -> None:
    """Three phases: before, while and after Redis is stopped by SIGSTOP."""
    one = await site.start_router()
    await site.start_router()
    await site.all_sharing()
    lone = await site.start_router(state={"kind": "memory"})
    site.routers.remove(lone)
    clients = await RawClient.connect(one.address), await RawClient.connect(lone.address)
    print(HEADS)
    tell("before", *await pairs_ms(*clients, seconds))
    site.server.freeze()
    tell("frozen", *await pairs_ms(*clients, seconds))
    site.server.thaw()
    thawed_at = time.monotonic()
    await site.all_sharing()
    print(f"sharing again {time.monotonic() - thawed_at:.1f} s after the thaw")
    tell("after", *await pairs_ms(*clients, seconds))
    for client in clients:
        client.leave()


async def turns(server: RedisServer, members: Members, seconds: float) -> None:
    """The same three phases; both routers send 300 prompts of 72 blocks a second."""
    one, two = await members.pair()

    async def busy(seconds: float) -> None:
        stop, sent = time.monotonic() + seconds, 0
        while time.monotonic() < stop:
            for member in (one, two):
                member.end(member.send(sent % 500, blocks=72))
                sent += 1
            await asyncio.sleep(1 / 300)

    print(f"\nprocessor time of a turn of the loop, ms\n{HEADS}")
    for phase in ("before", "frozen", "after"):
        if phase != "before":
            (server.freeze if phase == "frozen" else server.thaw)()
        with turns_ms() as found:
            await busy(seconds)
        print(f"{phase:<18} {len(found):>6} {quantiles(found)}", flush=True)
    await until(lambda: one.report.state == two.report.state == "sharing")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase (default %(default)s)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        with_site(Path(folder), lambda site: over_http(site, seconds), replicas=1)
    with_redis(
        lambda server, members: turns(server, members, seconds), lease_s=5.0, flush_ms=5.0, timeout_ms=1_000.0
    )


if __name__ == "__main__":
    main()
