"""Who can be simulated: the router's own policies by their ``kind``, other routers' rules, and bounds."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.routing.policies import POLICIES
from router.routing.view import Policy
from sim.pooled_cache import PooledFinish
from sim.rivals import RIVALS

HOLDING_POLICY = "predicted_finish"
"""The only policy under which the router holds requests (``router.proxy.assembly``)."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One entry of a comparison."""

    name: str
    make: Callable[[random.Random], Policy]
    """From a seeded generator, one policy per router."""
    holds: bool = False
    """The router keeps requests while their replica has enough to prefill."""
    pooled: bool = False
    """All replicas share one cache (``pooled_cache``)."""
    informed: bool = False
    """Told what no router is told (``perfect_knowledge``)."""


CONTENDERS: Mapping[str, Contender] = {
    **{kind: Contender(kind, make, kind == HOLDING_POLICY) for kind, make in POLICIES.items()},
    **{kind: Contender(kind, make) for kind, make in RIVALS.items()},
    "pooled_cache": Contender("pooled_cache", PooledFinish, holds=True, pooled=True),
    "perfect_knowledge": Contender("perfect_knowledge", POLICIES[HOLDING_POLICY], holds=True, informed=True),
}


def contender(name: str) -> Contender:
    """By name. Raises ValueError that lists the names there are."""
    if name not in CONTENDERS:
        raise ValueError(f"policy {name!r} is unknown; expected one of {names()}")
    return CONTENDERS[name]


def names() -> str:
    """Every name, for messages and help."""
    return ", ".join(sorted(CONTENDERS))
