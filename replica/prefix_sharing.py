"""Two cold requests with one prefix: the second waits for the first's prefill instead of repeating it.

The blocks a prefill is computing are not hittable yet. A waiting sequence whose first missing block is about
to come out of a running prefill steps aside (others may pass) until that block is published. Of 16 identical
prompts in one step, one computes and fifteen hit. No token of work is lost by it, and nobody starves: a wait
ends with the owner's prefill, and a sequence waits for at most ``MAX_DEFERRALS`` prefills.
"""

from collections.abc import Iterable
from typing import Any

from replica.kv_cache.cache import Cache
from replica.sequence import Sequence

MAX_DEFERRALS = 8
"""Prefills of others one sequence may wait for before it computes its own copy."""


def defer(sequence: Sequence, missing_block: int, prefilling: Iterable[Sequence], cache: Cache[Any]) -> bool:
    """Make ``sequence`` wait if one of ``prefilling`` will publish its block ``missing_block``; True if so.

    Never for a less urgent prefill.
    """
    if not sequence.reads_cache:
        return False
    for owner in prefilling:
        if owner.priority <= sequence.priority and cache.will_publish(owner, sequence, missing_block):
            if sequence.deferred_admission != owner.admission:
                if sequence.deferrals >= MAX_DEFERRALS:
                    return False
                sequence.deferrals += 1
                sequence.deferred_admission = owner.admission
            return True
    return False
