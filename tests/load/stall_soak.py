"""How long requests of a megabyte hold a router's event loop, by what they are made of."""

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from rich import box
from rich.console import Console
from rich.table import Column, Table

from tests.fakes.raw_client import RawClient
from tests.load.measured_fleet import MeasuredRouter, measured_fleet
from tests.load.memory_soak import prompt
from tests.load.watched_router import KEEP_FROM_MS

SHARES = (0.5, 0.9, 0.99, 0.999)
MIB = 1024 * 1024


def text(number: int, body_bytes: int) -> bytes:
    """One message of one long string."""
    return _chat(b'{"role":"user","content":"%b"}' % prompt(number, body_bytes).encode())


def code(number: int, body_bytes: int) -> bytes:
    """2,000 messages of program text, full of what would be JSON outside strings."""
    source = Path(__file__).read_text(encoding="utf-8")
    turn = source * (body_bytes // 2_000 // len(source) + 1)
    one = json.dumps({"role": "user", "content": turn[: body_bytes // 2_400]}).encode()
    return _chat(b'{"role":"user","content":"%d"}' % number, *[one] * 2_000)


def messages(number: int, body_bytes: int) -> bytes:
    """Short messages, 32,000 in a megabyte."""
    one = b'{"role":"user","content":"hi"}'
    return _chat(b'{"role":"user","content":"%d"}' % number, *[one] * (body_bytes // (len(one) + 2)))


def lists(number: int, body_bytes: int) -> bytes:
    """Empty lists, 350,000 in a megabyte."""
    return b'{"model":"m","prompt":[%d,%b]}' % (number, b",".join([b"[]"] * (body_bytes // 3 - 20)))


def token_ids(number: int, body_bytes: int) -> bytes:
    """A prompt of 160,000 token ids in a megabyte."""
    rng = random.Random(number)
    return b'{"model":"m","prompt":[%b]}' % b",".join(
        b"%d" % rng.randrange(128_000) for _ in range(body_bytes // 7)
    )


def _chat(*turns: bytes) -> bytes:
    return b'{"model":"m","messages":[%b]}' % b",".join(turns)


ROWS: tuple[tuple[str, Callable[[int, int], bytes] | None, int], ...] = (
    ("none", None, 0),
    ("one text, 2 KiB", text, 2_048),
    ("one text, 32 KiB", text, 32_768),
    ("one text, 256 KiB", text, 262_144),
    ("one text, 1 MiB", text, MIB),
    ("2,000 messages of code, 1 MiB", code, MIB),
    ("32,000 messages, 1 MiB", messages, MIB),
    ("350,000 lists, 1 MiB", lists, MIB),
    ("150,000 token ids, 1 MiB", token_ids, MIB),
)


async def stall_soak(folder: Path, args: argparse.Namespace, console: Console) -> int:
    """Post ``args.prompts`` of each kind, one after the other; exit code 1 if the loop was held too long."""
    table = Table(
        Column("requests", no_wrap=True),
        Column("turns", no_wrap=True),
        *(Column(f"p{share:.1%}".rstrip("0%").rstrip("."), no_wrap=True) for share in SHARES),
        Column("max", no_wrap=True),
        Column(f"> {args.limit_ms:g}", no_wrap=True),
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    _add_row(table, "fixed work", _fixed_work(args.prompts * 5), args.limit_ms)
    worst = 0.0
    out = folder / "held.json"
    os.environ["WATCH_FILE"] = str(out)
    async with measured_fleet(folder, module="tests.load.watched_router", arguments=()) as router:
        for name, make, body_bytes in ROWS:
            await _post(router, make, body_bytes, 3)  # whatever is done once is done
            await asyncio.to_thread(_held, router, out)
            await _post(router, make, body_bytes, args.prompts)
            held = await asyncio.to_thread(_held, router, out)
            _add_row(table, name, held, args.limit_ms)
            worst = max(worst, *held)
        router.child.signal_group(signal.SIGTERM)
        await asyncio.to_thread(router.child.wait, 30.0)
    console.print(table)
    console.print(
        f"Processor time of the loop's thread in one turn, ms; turns from {KEEP_FROM_MS} ms.\n"
        "fixed work: the same parsing each time; what differs is the machine's doing."
    )
    return 1 if worst > args.limit_ms else 0


def _add_row(table: Table, name: str, held: list[float], limit_ms: float) -> None:
    held = sorted(held)
    row = [f"{held[min(len(held) - 1, int(share * len(held)))]:.2f}" for share in SHARES]
    over = sum(one > limit_ms for one in held)
    table.add_row(name, f"{len(held):,}", *row, f"{held[-1]:.2f}", f"{over:,}")


def _fixed_work(count: int) -> list[float]:
    """Milliseconds of processor time that one piece of work takes, ``count`` times."""
    body = code(0, 2 * MIB)
    spent = []
    gc.disable()
    for _ in range(count):
        began = time.thread_time()
        orjson.loads(body)
        spent.append(1000.0 * (time.thread_time() - began))
    gc.enable()
    return spent


def _held(router: MeasuredRouter, out: Path) -> list[float]:
    """Milliseconds held, turn by turn, since this was last asked."""
    out.unlink(missing_ok=True)
    router.child.signal_group(signal.SIGUSR1)
    limit = time.monotonic() + 10.0
    while not out.exists() and time.monotonic() < limit:
        time.sleep(0.005)
    held: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return held or [0.0]


async def _post(
    router: MeasuredRouter, make: Callable[[int, int], bytes] | None, body_bytes: int, count: int
) -> None:
    connection = await RawClient.connect(router.address)
    for number in range(count):
        if make is None:
            await asyncio.sleep(0.01)
            continue
        await connection.post(make(number, body_bytes))
        answer = await connection.answer()
        assert answer.status == 200, answer
    connection.leave()
