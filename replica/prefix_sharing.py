"""Two cold requests with one prefix: the second waits for the first's prefill instead of repeating it.

The blocks a prefill is computing are not hittable yet. A waiting sequence whose first missing block is about
to come out of a running prefill steps aside (others may pass) until that block is published. Of 16 identical
prompts in one step, one computes and fifteen hit. No token of work is lost by it, and nobody starves: a wait
ends with the owner's prefill, and a sequence waits for at most ``MAX_DEFERRALS`` prefills.
"""

from collections.abc import Iterable

from replica.sequence import Sequence

MAX_DEFERRALS = 8
"""Prefills of others one sequence may wait for before it computes its own copy."""


def defer(sequence: Sequence, missing_block: int, prefilling: Iterable[Sequence], block_size: int) -> bool:
    """Make ``sequence`` wait if one of ``prefilling`` will publish its block ``missing_block``; True if so.

    Never for the block that holds the sequence's last token, which no hit may cover, nor for a less urgent
    prefill. Block hashes are chained, so an equal hash at an equal place means an equal prefix; if it does
    not (a collision), the wait was in vain and nothing else.
    """
    hashes = sequence.block_hashes
    if not sequence.reads_cache or missing_block >= min(
        len(hashes), (sequence.total_tokens - 1) // block_size
    ):
        return False
    missing = hashes[missing_block]
    for owner in prefilling:
        if (
            missing_block < min(len(owner.block_hashes), owner.total_tokens // block_size)
            and owner.block_hashes[missing_block] == missing
            and owner.published_blocks <= missing_block
            and owner.priority <= sequence.priority
        ):
            if sequence.deferred_admission != owner.admission:
                if sequence.deferrals >= MAX_DEFERRALS:
                    return False
                sequence.deferrals += 1
                sequence.deferred_admission = owner.admission
            return True
    return False
