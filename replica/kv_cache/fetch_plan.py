"""Fetch or recompute: how many blocks of a prompt to copy from lower tiers before computing the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from replica.contract.prefill_cost import PrefillCost


class Tier(Enum):
    """Where KV can lie beside the device; the value is the medium that KV events name."""

    HOST = "CPU"
    DISK = "STORAGE"
    PEER = "PEER"


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What one copy from a tier costs now."""

    latency_s: float
    seconds_per_byte: float

    def seconds(self, size_bytes: int) -> float:
        """Of a copy of ``size_bytes``."""
        return self.latency_s + self.seconds_per_byte * size_bytes


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Copy blocks ``start_block .. start_block + len(sources) - 1``, compute what follows."""

    start_block: int
    """First block the device lacks."""
    sources: tuple[Tier, ...]
    """Where each block comes from, in order; empty: compute everything."""
    within_reach: int
    """Blocks that could have been fetched."""
    seconds: float
    """Expected until the prompt is prefilled."""
    recompute_s: float
    """Expected without fetching."""
    give_up_s: float
    """When the copying has taken so long, recompute what is missing: from here on it would have been faster
    from the start, and so a wrong expectation never costs more than the prompt's own prefill again."""

    @property
    def stop_block(self) -> int:
        """First block after the fetched ones."""
        return self.start_block + len(self.sources)


def plan_fetch(
    prompt_tokens: int,
    start_block: int,
    reach: Sequence[Tier],
    speeds: Mapping[Tier, TierSpeed],
    prefill: PrefillCost,
    *,
    block_tokens: int,
    block_bytes: int,
    layers: int = 1,
    wait_s: float = 0.0,
    least_gain: float = 0.05,
) -> FetchPlan:
    """The number of blocks to fetch for which the prompt is prefilled soonest. O(blocks within reach).

    The device holds blocks before ``start_block``; ``reach[i]`` holds block ``start_block + i``. With ``n``
    of them fetched in F seconds the rest is computed in C: one after the other F + C, or layer by layer while
    computing, ``max(F, C) + min(F, C) / layers``. ``wait_s`` passes before computing can begin anyway, and
    hides as much of F. At least one token is computed. A fetch must save ``least_gain`` of the prompt's
    computing, or it is not worth its risk.

    A prompt of 3,300 tokens, 2,896 of them on disk (128 KB a token, 2 GB/s), at 31 µs a token: 190 ms to
    fetch, more than the 91 ms it saves. On the host (20 GB/s) it is 19 ms:

    >>> cost = PrefillCost(fixed_s=0.004, per_token_s=31e-6)
    >>> def plan(tier, bytes_per_s, layers=1):
    ...     speeds = {tier: TierSpeed(0.0001, 1 / bytes_per_s)}
    ...     found = plan_fetch(3_300, 0, [tier] * 181, speeds, cost, block_tokens=16,
    ...                        block_bytes=16 * 131_072, layers=layers)
    ...     return len(found.sources), round(1e3 * found.seconds, 1), round(1e3 * found.recompute_s, 1)
    >>> plan(Tier.DISK, 2e9), plan(Tier.HOST, 20e9), plan(Tier.HOST, 20e9, layers=32)
    ((0, 108.9, 108.9), (181, 36.2, 108.9), (178, 19.3, 108.9))
    """
    matched = start_block * block_tokens
    most = max(0, min(len(reach), (prompt_tokens - 1 - matched) // block_tokens))
    recompute_s = wait_s + prefill.seconds(prompt_tokens - matched, matched)
    best, best_s, best_compute_s = 0, recompute_s - least_gain * (recompute_s - wait_s), 0.0
    fetch_s = 0.0
    used: set[Tier] = set()
    for count in range(1, most + 1):
        tier = reach[count - 1]
        speed = speeds[tier]
        fetch_s += speed.seconds_per_byte * block_bytes
        if tier not in used:
            used.add(tier)
            fetch_s += speed.latency_s
        position = matched + count * block_tokens
        compute_s = prefill.seconds(prompt_tokens - position, position)
        seen_s = max(0.0, fetch_s - wait_s)
        seconds = wait_s + max(seen_s, compute_s) + min(seen_s, compute_s) / layers
        if seconds < best_s:
            best, best_s, best_compute_s = count, seconds, compute_s
    if not best:
        return FetchPlan(start_block, (), most, recompute_s, recompute_s, 0.0)
    return FetchPlan(
        start_block, tuple(reach[:best]), most, best_s, recompute_s, recompute_s - best_compute_s
    )
