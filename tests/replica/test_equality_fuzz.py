"""4,200 requests of the fuzz; ``make fuzz`` does 50,000."""

from pathlib import Path

import pytest

from replica.kv_cache.fetch_plan import Tier
from tests.replica.equality_fuzz import SETTINGS, Fuzz, Known, engine_for

KNOWN: Known = {}
REQUESTS = 200


@pytest.mark.parametrize("name", SETTINGS)
def test_random_traffic_gets_the_tokens_of_a_fresh_engine_without_cache(name: str, tmp_path: Path) -> None:
    fuzz, engine = Fuzz(20, KNOWN), engine_for(SETTINGS[name], tmp_path)
    with fuzz.peers_for(SETTINGS[name]):
        fuzz.run(engine, REQUESTS)
    assert fuzz.aborted, "the test saw aborts"
    least = 1_000 if engine.states is None else 200  # a state cannot be cut: fewer places to restart from
    assert (fuzz.cached_tokens > least) == engine.limits.prefix_caching, "and hits"
    if engine.limits.prefix_caching:
        assert fuzz.adapter_cached_tokens > least / 5 and fuzz.images_cached > 0, "of adapters and images too"
    if engine.states is not None:
        assert engine.states.counters.restored > 10 and engine.states.inventory().live == 0
    if "tiny pool" in name:
        assert engine.preemptions > 0
    if engine.tier_counters is not None:
        assert sum(engine.tier_counters.fetched.values()) > 20  # how many come in time, the machine decides
        if fuzz.sources:
            counters = engine.tier_counters
            assert counters.fetched[Tier.PEER] > 20 and counters.failed_fetches > 3, "peers gave, and failed"
            assert counters.corrupt > 0
    engine.close()
