"""Memory of a router over very many requests whose prompts have nothing in common."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.fakes.raw_client import RawClient
from tests.load.measured_fleet import MeasuredRouter, measured_fleet

SAMPLES = 400
FLAT = 1.10
"""The last quarter's memory over the second's, at most. In the first, caches and the index fill."""


def prompt(number: int, prompt_bytes: int) -> str:
    """Unique in every block of it."""
    return f"{number:09d} " * (prompt_bytes // 10)


async def memory_soak(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Send ``args.requests``; exit code 1 if one is not answered or memory grows."""
    async with measured_fleet(folder) as router:
        samples, failed = await _send_all(router, args, console)
    quarter = max(1, len(samples) // 4)
    table = Table("requests", "RSS MiB, median", "index nodes, last")
    quarters = [samples[at * quarter : (at + 1) * quarter] for at in range(4)]
    for name, part in zip(("first quarter", "second", "third", "last quarter"), quarters, strict=True):
        table.add_row(name, f"{median(rss for rss, _ in part):.1f}", f"{part[-1][1]:,}")
    console.print(table)
    second, last = (median(rss for rss, _ in quarters[at]) for at in (1, 3))
    console.print(
        f"{args.requests:,} requests of {args.prompt_bytes:,} bytes, {failed} failed; "
        f"last quarter over second {last / second:.3f}"
    )
    return 1 if failed or last > FLAT * second else 0


async def _send_all(
    router: MeasuredRouter, args: argparse.Namespace, console: Console
) -> tuple[list[tuple[float, int]], int]:
    """Resident memory and index nodes, sampled evenly over the requests; how many failed."""
    numbers: Iterator[int] = iter(range(args.requests))
    every = max(1, args.requests // SAMPLES)
    samples: list[tuple[float, int]] = []
    failed = 0

    async def worker() -> None:
        nonlocal failed
        connection = await RawClient.connect(router.address)
        for number in numbers:
            words = prompt(number, args.prompt_bytes)
            await connection.post({"model": "m", "messages": [{"role": "user", "content": words}]})
            answer = await connection.answer()
            failed += not (answer.status == 200 and answer.whole)
            if number % every == 0:
                samples.append((router.rss_mib(), int((await router.fleet())["index_nodes"])))
                progress.update(bar, completed=number)
        connection.leave()

    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("requests", total=args.requests)
        await asyncio.gather(*(worker() for _ in range(args.workers)))
    return samples, failed
