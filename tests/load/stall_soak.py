"""How long prompts of a megabyte hold a router's event loop."""

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fakes.raw_client import RawClient
from tests.load.measured_fleet import MeasuredRouter, measured_fleet
from tests.load.memory_soak import prompt

SHARES = (0.5, 0.9, 0.99, 0.999)


async def stall_soak(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Post ``args.prompts`` of each size, one after the other; exit code 1 if the loop was held too long."""
    table = Table(
        "prompt bytes",
        "looks",
        *(f"p{share:.1%}".rstrip("0%").rstrip(".") for share in SHARES),
        "max ms",
        f"over {args.limit_ms} ms",
    )
    worst = 0.0
    for size in (0, 2_048, 32_768, 262_144, 1_048_576):
        held = sorted(await _measure(folder, size, args))
        row = [f"{held[min(len(held) - 1, int(share * len(held)))]:.2f}" for share in SHARES]
        over = sum(one > args.limit_ms for one in held)
        table.add_row(f"{size:,}" if size else "none", f"{len(held):,}", *row, f"{held[-1]:.2f}", f"{over:,}")
        worst = held[-1]
    console.print(table)
    console.print("processor time of the loop's thread between two looks, a millisecond apart when idle")
    return 1 if worst > args.limit_ms else 0


async def _measure(folder: Path, size: int, args: argparse.Namespace) -> list[float]:
    """Milliseconds held, look by look, while prompts of ``size`` bytes come; of 0: while nothing does."""
    out = folder / f"held-{size}.json"
    os.environ["WATCH_FILE"] = str(out)
    async with measured_fleet(folder, module="tests.load.watched_router", arguments=()) as router:
        await _post(router, size, 3)  # whatever is done once is done
        router.child.signal_group(signal.SIGUSR1)
        await _post(router, size, args.prompts)
        router.child.signal_group(signal.SIGTERM)
        await asyncio.to_thread(router.child.wait, 30.0)
    held: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return held


async def _post(router: MeasuredRouter, size: int, count: int) -> None:
    connection = await RawClient.connect(router.address)
    for number in range(count):
        if not size:
            await asyncio.sleep(0.01)
            continue
        await connection.post({"model": "m", "messages": [{"role": "user", "content": prompt(number, size)}]})
        answer = await connection.answer()
        assert answer.status == 200, answer
    connection.leave()
