"""Which candidate a key belongs to, and how much more than its share one may carry.

Rendezvous hashing (Thaler and Ravishankar, 1998): a key's home is the candidate with the highest hash of
(key, candidate). When a replica comes or goes only the keys of that replica move. Bounded loads (Mirrokni,
Thorup and Zadimoghaddam, 2017): a home that carries more than ``bound`` times the mean passes the key on to
the next highest.
"""

from collections.abc import Sequence
from math import ceil, fsum, inf, log

import mmh3

from router.routing.replica_state import ReplicaState

DEFAULT_BOUND = 1.25


def home(key: bytes, candidates: Sequence[ReplicaState], bound: float = inf) -> tuple[ReplicaState, bool]:
    """The home of ``key`` among ``candidates``, and whether it is the first choice.

    A candidate is passed over while as many requests are in flight there or wait for it as ``bound`` times
    the mean of all (the new one counted, weights respected), rounded up. Cost: O(candidates log candidates).
    """
    assigned = [candidate.assigned for candidate in candidates]
    per_weight = (sum(assigned) + 1) / fsum(candidate.weight for candidate in candidates)
    ranked = sorted(
        range(len(candidates)),
        key=lambda i: _rank(key, candidates[i].name, candidates[i].weight),
        reverse=True,
    )
    for position, i in enumerate(ranked):
        if bound == inf or assigned[i] < ceil(bound * per_weight * candidates[i].weight):
            return candidates[i], position == 0
    return candidates[ranked[0]], True


def _rank(key: bytes, name: str, weight: float) -> float:
    """A number in (0, inf): highest wins with a chance in proportion to ``weight``."""
    digest = mmh3.mmh3_x64_128_utupledigest(key + b"\x00" + name.encode(), 0x686F6D65)[0]
    return -weight / log((digest + 0.5) / 2.0**64)
