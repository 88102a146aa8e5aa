"""What tests of the cache contract do with a cache, whichever it is."""

from replica.sequence import Sequence

PREFIX = list(range(100, 120))
"""20 tokens: 5 blocks."""


def request(name, tokens, **options):
    """A sequence that may generate 8 tokens."""
    return Sequence(name, tokens, 8, **options)


def start(cache, sequence):
    """Match, adopt and compute; tokens that were hit, or None when it does not fit."""
    matched = cache.match(sequence)
    if not cache.adopt(sequence, matched):
        return None
    compute(cache, sequence)
    return len(matched) * cache.block_size


def compute(cache, sequence, tokens=None):
    """All tokens, or so many, are computed and published."""
    sequence.computed_tokens = sequence.total_tokens if tokens is None else tokens
    cache.publish(sequence)


def run(cache, sequence):
    """Start to end; tokens that were hit."""
    found = start(cache, sequence)
    cache.release(sequence)
    return found


def hit(cache, tokens, **options):
    """Tokens a request that goes on after ``tokens`` would hit."""
    return len(cache.match(request("probe", [*tokens, 1 << 30], **options))) * cache.block_size


def whole(cache):
    """Nobody holds anything, nothing is lost."""
    cache.check_invariants([])
    return cache.free_blocks == cache.blocks and cache.stranded_tokens() == 0
