"""What nobody can beat: the cached share of one infinite cache that sees every request."""

from collections.abc import Iterable, Sequence


class InfiniteCache:
    """Keeps every block of every prompt for ever, the moment the prompt arrives.

    The last token of a prompt is always computed (it gives the first output token), so a block that ends a
    prompt is never a hit.

    >>> cache = InfiniteCache(block_tokens=16)
    >>> cache.arrived([1, 2], 40), cache.arrived([1, 2], 40), cache.arrived([1, 2], 32)
    (0, 32, 16)
    """

    __slots__ = ("_block_tokens", "_seen")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._seen: set[int] = set()

    def arrived(self, block_ids: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of this prompt that were there already; from now on all its full blocks are."""
        hit = 0
        for block in block_ids:
            if block not in self._seen:
                break
            hit += 1
        self._seen.update(block_ids[hit:])
        return min(hit, (prompt_tokens - 1) // self._block_tokens) * self._block_tokens


def ideal_cached_share(prompts: Iterable[tuple[Sequence[int], int, bool]], block_tokens: int) -> float | None:
    """Cached share of prompt tokens of one infinite cache; ``None`` when nothing is measured.

    ``prompts`` are (block ids, prompt tokens, measured) in order of arrival; those not measured warm the
    cache and are not counted.
    """
    cache = InfiniteCache(block_tokens)
    hit = total = 0
    for block_ids, prompt_tokens, measured in prompts:
        found = cache.arrived(block_ids, prompt_tokens)
        if measured:
            hit += found
            total += prompt_tokens
    return hit / total if total else None
