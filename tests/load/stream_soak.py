"""Very many streams at once through one router: nothing lost, and what an idle one costs."""

import argparse
import asyncio
import resource
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fakes.proxy_rig import CHAT_STREAM, until
from tests.fakes.raw_client import RawClient
from tests.load.measured_fleet import MeasuredRouter, measured_fleet
from tests.load.quick_replica import FIRST, REST

SPARE_FILES = 500
AT_ONCE = 200
LIMIT_S = 180.0
RIGHT = (FIRST.partition(b"\r\n\r\n")[2] + REST).count(b"data: ")


async def stream_soak(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Hold ``args.streams`` open; exit code 1 if one is not whole or costs over ``args.limit_kib``."""
    _allow_files(2 * args.streams + SPARE_FILES)
    async with measured_fleet(folder, hold_s=args.hold_s) as router:
        whole, before, during, after = await _hold_all(router, args)
    per_stream_kib = (during - before) * 1024 / args.streams
    table = Table("streams", "whole", "RSS MiB before", "while open", "after", "KiB per idle stream")
    table.add_row(
        f"{args.streams:,}",
        f"{whole:,}",
        f"{before:.1f}",
        f"{during:.1f}",
        f"{after:.1f}",
        f"{per_stream_kib:.1f}",
    )
    console.print(table)
    return 0 if whole == args.streams and per_stream_kib <= args.limit_kib else 1


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files for this process and its children. Raises ``OSError``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OSError(f"{count} open files are needed, the system allows {hard}; raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


async def _hold_all(router: MeasuredRouter, args: argparse.Namespace) -> tuple[int, float, float, float]:
    """Streams that came whole; the router's memory before, while all are open and idle, and after."""
    warm = await RawClient.connect(router.address)
    await warm.post({**CHAT_STREAM, "stream": False})
    await warm.answer()
    before = router.rss_mib()
    begun = 0
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> bool:
        nonlocal begun
        async with gate:
            connection = await RawClient.connect(router.address)
            connection.limit_s = LIMIT_S
            await connection.post(CHAT_STREAM)
            head = await connection.head()
            first = await connection.chunk()
            begun += 1
        events = 1 if first else 0
        while piece := await connection.chunk():
            events += piece.count(b"data: ")
        connection.leave()
        return head.status == 200 and piece == b"" and events == RIGHT

    streams = [asyncio.create_task(one()) for _ in range(args.streams)]
    await until(lambda: begun == args.streams, LIMIT_S)
    during = router.rss_mib()
    whole = sum(await asyncio.gather(*streams))
    warm.leave()
    return whole, before, during, router.rss_mib()
