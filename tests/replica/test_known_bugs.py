"""Bugs that other engines had (numbers of the research notes) and whose class no other file tests.

The table of all of them is in docs/conformance.md.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.engine import Engine
from replica.engine_limits import TierLimits
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.sequence import Sequence
from tests.replica.equality_fuzz import BLOCK, DEAR
from tests.replica.models import finish_all, greedy_request, make_engine, random_model

PROMPT = tuple((7 * at) % 256 for at in range(70))
STRANGERS = [tuple((7 * at + 31 * number) % 256 for at in range(70)) for number in (1, 2)]


def cached_tokens(engine: Engine, prompt: tuple[int, ...], salt: str | None = None) -> int:
    """Of a request of its own."""
    asked = replace(greedy_request("a", prompt, 1), salt=salt)
    return finish_all(engine, [asked])["a"][-1].cached_tokens


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_bug_8_a_salt_parts_what_lower_tiers_hold_and_shares_it_under_itself(
    tier: Tier, tmp_path: Path
) -> None:
    host = {"host_bytes": 40 * BLOCK}
    disk = {"disk_folder": tmp_path, "disk_bytes": 40 * BLOCK}
    tiers = TierLimits(**(host if tier is Tier.HOST else disk), prefill=DEAR)  # type: ignore[arg-type]
    engine = make_engine(kv_blocks=7, max_model_len=112, tiers=tiers)
    try:
        assert cached_tokens(engine, PROMPT, "one") == 0
        for stranger in STRANGERS:
            cached_tokens(engine, stranger)
        assert engine.tier_counters is not None and engine.tier_counters.saved >= 4
        assert cached_tokens(engine, PROMPT, "two") == cached_tokens(engine, PROMPT) == 0
        assert cached_tokens(engine, PROMPT, "one") == 64
        assert engine.tier_counters.fetched[tier] >= 4
    finally:
        engine.close()


def test_bug_11_neighbours_that_even_each_other_out_in_a_rolling_hash() -> None:
    tokens = list(range(1_000, 1_016))
    shifted = tokens.copy()
    shifted[4] += 31
    shifted[5] -= 1
    assert chain(tokens, 16, root_hash()) != chain(shifted, 16, root_hash())


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_bug_14_log_probabilities_after_a_hit_are_those_without_one(model: str) -> None:
    engine = make_engine(random_model(model), batch_invariant=True)
    asked = greedy_request("a", PROMPT, 6)
    asked = replace(asked, sampling=replace(asked.sampling, logprobs=3))
    told = []
    for cached in (0, 64):
        deltas = finish_all(engine, [asked])["a"]
        assert deltas[-1].cached_tokens == cached
        told.append([drawn for delta in deltas for drawn in delta.tokens])
    assert len(told[0]) == 6
    for cold, warm in zip(*told, strict=True):
        assert cold.token == warm.token and len(cold.top) == 3
        assert cold.logprob is not None and warm.logprob is not None
        assert math.isclose(cold.logprob, warm.logprob, abs_tol=1e-4)
        assert [one.token for one in cold.top] == [one.token for one in warm.top]


def test_bug_25_an_admission_that_finds_no_blocks_takes_no_state() -> None:
    states = StateCheckpoints(3)
    cache = HybridCache(PrefixCache(4, 4), states)
    held = Sequence("held", range(10), 4)
    assert cache.adopt(held, cache.match(held))
    before = states.inventory()
    late = Sequence("late", range(100, 110), 4)
    matched = cache.match(late)
    assert not cache.fits(late, matched) and not cache.adopt(late, matched)
    assert states.inventory() == before and not states.holds(late)
    cache.check_invariants([held])
    cache.release(held)
    assert states.inventory().live == 0 and cache.adopt(late, matched)


def test_bug_25_an_admission_that_finds_no_state_takes_no_blocks() -> None:
    cache = HybridCache(PrefixCache(40, 4), StateCheckpoints(1))
    held, late = Sequence("held", range(10), 4), Sequence("late", range(100, 110), 4)
    assert cache.adopt(held, cache.match(held))
    free = cache.free_blocks
    matched = cache.match(late)
    assert not cache.fits(late, matched) and not cache.adopt(late, matched)
    assert cache.free_blocks == free > 30 and not late.block_table
    cache.release(held)
    assert cache.fits(late, matched) and cache.adopt(late, matched)


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_bug_38_every_kind_of_model_tells_what_it_caches(model: str) -> None:
    engine = make_engine(random_model(model), kv_blocks=7, max_model_len=112, record_events=True)
    told: dict[type, list[Any]] = {BlocksStored: [], BlocksRemoved: []}
    for prompt in (PROMPT, *STRANGERS):
        finish_all(engine, [greedy_request("a", prompt, 2)])
        for event in engine.take_events():
            told[type(event)] += event.block_hashes  # type: ignore[union-attr]
    assert told[BlocksStored][:4] == chain(PROMPT, 16, root_hash())
    assert len(told[BlocksStored]) >= 12 and told[BlocksRemoved]
