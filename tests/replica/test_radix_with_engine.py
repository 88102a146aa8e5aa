"""The torch engine on the radix tree: pages of one token, tables whose entries are exchanged, same tokens."""

import random

import pytest

from replica.kv_cache.cache_settings import CacheSettings
from tests.replica.models import finish_all, greedy_request, make_engine, token_ids


@pytest.mark.parametrize(
    ("page", "blocks", "order"), [(1, 600, "lru"), (1, 170, "slru"), (4, 60, "lfu"), (16, 14, "lru")]
)
def test_the_same_tokens_as_a_fresh_engine_without_cache(page, blocks, order):
    rng = random.Random(page)
    shared = [rng.randrange(256) for _ in range(80)]
    requests = [
        greedy_request(
            f"{number}",
            tuple(
                shared[: rng.choice([0, 17, 40, 80])] + [rng.randrange(256) for _ in range(1 + 3 * number)]
            ),
            5 + number % 3,
        )
        for number in range(12)
    ]
    twins = [greedy_request(f"twin {request.request_id}", request.prompt, 9) for request in requests[:6]]
    expected = {}
    for request in [*requests, *twins]:
        alone = make_engine(prefix_caching=False, batch_invariant=True)
        expected[request.request_id] = token_ids(finish_all(alone, [request])[request.request_id])
    cache = CacheSettings("radix", page, eviction=order)
    engine = make_engine(
        block_size=page, kv_blocks=blocks, cache=cache, max_model_len=160, batch_invariant=True
    )
    for _ in range(2):
        deltas = finish_all(engine, [*requests, *twins])
        assert {name: token_ids(found) for name, found in deltas.items()} == expected
        engine.check_invariants()
    assert sum(found[-1].cached_tokens for found in deltas.values()) > 300
    assert engine.load().kv_usage == 0.0
