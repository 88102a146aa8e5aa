"""What a cache costs beside the model: CPU per 1,000 prompt tokens to hash, match and allocate."""

import random
import statistics
import time
from typing import Any

from replica.kv_cache.cache import Cache
from replica.kv_cache.cache_settings import CacheSettings
from replica.sequence import Sequence

PROMPT_TOKENS = 1_000
STEMS = 8
WARM_UP = 30
CACHES = {
    "block cache": CacheSettings(),
    "radix tree": CacheSettings("radix", page_size=16),
    "radix tree, pages of 1": CacheSettings("radix", page_size=1),
}


def bookkeeping_us(settings: CacheSettings, prompts: int = 200, seed: int = 0) -> float:
    """Microseconds of CPU, median over ``prompts`` prompts of 1,000 tokens sharing 0 to 999 with others.

    Counted is what stands between a prompt's arrival and its first step: sequence, hash, match, blocks.
    """
    chance = random.Random(seed)
    cache: Cache[Any] = settings.make(64 * PROMPT_TOKENS, block_size=16)
    stems = [_tokens(chance, PROMPT_TOKENS) for _ in range(STEMS)]
    spent = []
    for number in range(WARM_UP + prompts):
        shared = chance.randrange(PROMPT_TOKENS)
        tokens = chance.choice(stems)[:shared] + _tokens(chance, PROMPT_TOKENS - shared)
        began = time.thread_time()
        sequence = Sequence(f"{number}", tokens, max_tokens=16)
        adopted = cache.adopt(sequence, cache.match(sequence))
        spent.append(time.thread_time() - began)
        assert adopted
        sequence.computed_tokens = PROMPT_TOKENS
        cache.publish(sequence)
        cache.release(sequence)
    return statistics.median(spent[WARM_UP:]) * 1e6 / (PROMPT_TOKENS / 1_000)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(50_000) for _ in range(count)]
