"""How torch's OpenMP threads wait for each other; must be said before torch is imported."""

import os
from collections.abc import MutableMapping

SPINS = "10000"
"""Turns of a waiting loop, some 0.1 ms: a forward pass has hundreds of parallel regions that far apart.

GCC's OpenMP sleeps after 1,000 turns where it counts more threads than cores, so that each region pays for
waking them (decode of SmolLM2-135M 2.0 times slower on two cores), and otherwise after 300,000: then two
threads of which one shares its core, as with the thread that answers clients, wait in vain (1.9 times).
"""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads spin for SPINS turns, unless ``environment`` says how they wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
