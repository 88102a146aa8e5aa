"""2,000 requests of the fuzz; ``make fuzz`` does 50,000."""

import pytest

from tests.replica.equality_fuzz import SETTINGS, Fuzz, engine_for

KNOWN: dict[tuple[int, ...], list[int]] = {}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_traffic_gets_the_tokens_of_a_fresh_engine_without_cache(name: str) -> None:
    fuzz, engine = Fuzz(20, KNOWN), engine_for(SETTINGS[name])
    fuzz.run(engine, 200)
    assert fuzz.aborted, "the test saw aborts"
    assert (fuzz.cached_tokens > 1_000) == engine.limits.prefix_caching, "and hits"
    if "tiny pool" in name:
        assert engine.preemptions > 0
