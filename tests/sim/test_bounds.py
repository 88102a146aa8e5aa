"""The infinite cache."""

import json
from importlib.resources import files

import pytest

from sim.bounds import ideal_cached_share
from sim.workload.sources import open_trace


def test_ideal_share_of_the_shipped_slice_counted_another_way() -> None:
    """From the file itself: a block is a hit if an earlier row has it; ids name whole prefixes."""
    text = (files("sim.workload") / "data" / "mooncake_conversation_1000.jsonl").read_text()
    seen: set[int] = set()
    hits = tokens = 0
    for line in text.splitlines():
        row = json.loads(line)
        usable = row["hash_ids"][: (row["input_length"] - 1) // 512]
        hits += 512 * len(seen.intersection(usable))
        seen.update(row["hash_ids"][: row["input_length"] // 512])
        tokens += row["input_length"]
    trace = open_trace("mooncake")
    share = ideal_cached_share(
        ((request.block_ids, request.prompt_tokens, True) for request in trace.requests), trace.block_tokens
    )
    assert share == pytest.approx(hits / tokens)
    assert share == pytest.approx(0.2155, abs=1e-4)


def test_what_is_not_measured_warms_the_cache() -> None:
    prompts = [([1, 2], 32, False), ([1, 2], 40, True), ([1, 3], 40, True)]
    assert ideal_cached_share(prompts, 16) == pytest.approx((32 + 16) / 80)
    assert ideal_cached_share([([1], 16, False)], 16) is None
