"""Request logs made for the tests of ``warmroute diagnose``: good traffic, and one fault at a time."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

Body = dict[str, Any]
Row = dict[str, Any]

WORDS = (
    "policy",
    "refund",
    "flight",
    "baggage",
    "seat",
    "change",
    "customer",
    "agent",
    "please",
    "check",
    "rules",
    "for",
    "each",
    "case",
    "today",
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("search", "book", "cancel", "refund")
]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def system_prompt(seed: int = 0) -> str:
    rng = random.Random(f"system {seed}")
    return "\n".join(f"Rule {number}: {words(rng, 20)}." for number in range(20))


def chats(
    *,
    requests: int = 80,
    conversations: int = 8,
    seed: int = 1,
    system: Callable[[int], str] = lambda number: system_prompt(),
    body: Callable[[int, Body], Body] = lambda number, body: body,
) -> list[Body]:
    """Conversations whose turns alternate; ``system`` writes request ``number``'s system prompt."""
    rng = random.Random(seed)
    said: list[list[Body]] = [[] for _ in range(conversations)]
    made = []
    for number in range(requests):
        messages = said[rng.randrange(conversations)]
        messages.append({"role": "user", "content": words(rng, 15)})
        prompt = [{"role": "system", "content": system(number)}, *messages]
        made.append(body(number, {"model": "m", "messages": prompt}))
        messages.append({"role": "assistant", "content": words(rng, 25)})
    return made


def retrieval(
    *, requests: int = 80, seed: int = 1, in_order: bool = False, numbered: bool = True
) -> list[Body]:
    """Four passages of twelve, as the retriever ranked them or in one order."""
    rng = random.Random(seed)
    corpus = [f"Passage about {words(rng, 40)}." for _ in range(12)]
    made = []
    for _ in range(requests):
        found = rng.sample(corpus, 4)
        if in_order:
            found.sort()
        parts = [f"[{place}] {text}" if numbered else text for place, text in enumerate(found, 1)]
        content = "\n\n".join([*parts, f"Question: {words(rng, 8)}?"])
        made.append({"model": "m", "messages": [{"role": "user", "content": content}]})
    return made


def write(folder: Path, rows: list[Row], name: str = "requests.jsonl") -> str:
    """The rows as a file; its path."""
    path = folder / name
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows) + b"\n")
    return str(path)
