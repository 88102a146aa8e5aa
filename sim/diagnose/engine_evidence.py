"""What replicas reported, against what caches fed with the same requests would have had."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.diagnose.sample import Sample

MOST_EXAMPLES = 3
LOW_SHARE = 0.5
"""A replica that reports less than this of what it should have had is named."""
STANDS_OUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReplicaEvidence:
    """One replica's counted requests; tokens."""

    replica: str
    requests: int
    prompt_tokens: int
    expected: int
    """By replay."""
    reported: int
    silent: int
    """Requests that should have had hits and reported 0."""


@dataclass(frozen=True, slots=True)
class Example:
    """One request that fell short."""

    line: int
    replica: str
    prompt_tokens: int
    expected: int
    reported: int
    matched: int | None
    """What the router believed."""


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    """All of it."""

    replicas: tuple[ReplicaEvidence, ...]
    examples: tuple[Example, ...]
    believed: int | None
    """Tokens the router believed to be cached, of requests whose log tells; ``None`` without."""
    of_believed: int
    """Of the same requests, tokens that were."""


def engine_evidence(
    sample: Sample, expected: Sequence[int], counted: Sequence[bool]
) -> EngineEvidence | None:
    """``None`` when nothing was measured. ``expected`` is by number of the request."""
    rows: dict[str, list[int]] = {}
    examples: list[Example] = []
    believed: int | None = None
    of_believed = 0
    for number, counts in enumerate(counted):
        reported = sample.measured_tokens(number)
        row = sample.words[number].row if sample.words else None
        if reported is None or row is None or not counts:
            continue
        tokens = sample.trace.requests[number].prompt_tokens
        replica = row.replica or "all"
        silent = not reported and expected[number] >= STANDS_OUT_TOKENS
        values = (1, tokens, expected[number], reported, int(silent))
        rows[replica] = [sum(pair) for pair in zip(rows.get(replica, [0] * 5), values, strict=True)]
        if row.matched_tokens is not None:
            believed = (believed or 0) + row.matched_tokens
            of_believed += row.cached_tokens or 0
        if expected[number] - reported >= STANDS_OUT_TOKENS:
            examples.append(
                Example(row.line, replica, tokens, expected[number], reported, row.matched_tokens)
            )
    if not rows:
        return None
    examples.sort(key=lambda one: one.reported - one.expected)
    return EngineEvidence(
        tuple(ReplicaEvidence(name, *values) for name, values in sorted(rows.items())),
        tuple(examples[:MOST_EXAMPLES]),
        believed,
        of_believed,
    )
