"""The upper half of the account: what the best cache could have had, and what mended prompts would add."""

from collections.abc import Sequence
from dataclasses import dataclass

from replica.contract.block_hash import TOKEN_BYTES, token_bytes
from sim.diagnose.account import Cause
from sim.diagnose.mend import Mended, mended
from sim.diagnose.prefix_set import PrefixSet
from sim.diagnose.prompt_doc import PromptDoc
from sim.diagnose.reach import Reach, reaches
from sim.diagnose.sample import Sample
from sim.simulate import Progress

DRIFT_SHARE = 0.05
DRIFT_BLOCKS = 2
"""Text and tokens part at places that differ by more than this: not the rounding of an estimate."""


@dataclass(frozen=True, slots=True)
class Win:
    """What one edit would win."""

    mended: Mended
    tokens: int
    requests: int
    """That would have more cached."""
    best: int
    """The request that would win most; a place in the order of arrival."""


@dataclass(frozen=True, slots=True)
class PromptLevels:
    """Cached tokens of the counted requests under one infinite cache, with ever better prompts."""

    levels: tuple[tuple[Cause, int], ...]
    """From the top: (cause, tokens left after it), down to block by block as the prompts are."""
    wins: tuple[Win, ...]
    shared: tuple[int, ...]
    """Per request in order of arrival, tokens in common with the most similar earlier one."""
    docs: tuple[PromptDoc, ...]
    """In order of arrival; empty without words."""
    reach: tuple[Reach, ...]
    """Of the prompts as they are."""
    drifted: int
    """Requests whose text agrees with an earlier prompt further than their tokens do."""
    drift_best: int | None
    """The one that lost most by it."""


def prompt_levels(
    sample: Sample,
    order: Sequence[int],
    ideal: Sequence[int],
    counted: Sequence[bool],
    progress: Progress | None = None,
) -> PromptLevels:
    """``ideal`` and ``counted`` are by number of the request, ``order`` is that of arrival."""
    tokens = [sample.trace.requests[number].prompt_tokens for number in order]
    counts = [counted[number] for number in order]
    best = [ideal[number] for number in order]
    base = _token_reach(sample, order)
    ideal_sum = _total(best, counts)
    docs = [doc for number in order if sample.words and (doc := sample.words[number].doc) is not None]
    if len(docs) < len(order):
        base = [max(pair) for pair in zip(base, best, strict=True)]
        levels = ((Cause.FIRST_SIGHT, _total(base, counts)), (Cause.BLOCKS, ideal_sum))
        return PromptLevels(levels, (), tuple(base), (), (), 0, None)
    reach = reaches(docs)
    texts = _tokens(reach, docs, tokens)
    exact = all(sample.words[number].token_ids is not None for number in order)
    base = [max(pair) for pair in zip(base if exact else texts, best, strict=True)]
    drift = [0] * len(order)
    if exact:
        drift = [
            text - token
            if text - token > max(DRIFT_BLOCKS * sample.trace.block_tokens, DRIFT_SHARE * length)
            else 0
            for text, token, length in zip(texts, base, tokens, strict=True)
        ]
    level = [min(length, one + more) for length, one, more in zip(tokens, base, drift, strict=True)]
    rising = [(Cause.BLOCKS, ideal_sum), (Cause.TEMPLATE, _total(base, counts))]
    wins: list[Win] = []
    for made in mended(docs, counts, progress):
        before = _tokens(made.before, docs, tokens)
        after = _tokens(made.after, docs, tokens)
        better = [
            max(0, min(length, one + new - old))
            for length, one, new, old in zip(tokens, level, after, before, strict=True)
        ]
        gains = [
            (new - old) if counts[place] else 0
            for place, (new, old) in enumerate(zip(better, level, strict=True))
        ]
        rising.append((made.edit.cause, _total(level, counts)))
        wins.append(
            Win(
                made,
                sum(gains),
                sum(gain > 0 for gain in gains),
                max(range(len(gains)), key=gains.__getitem__),
            )
        )
        level = better
    rising.append((Cause.FIRST_SIGHT, _total(level, counts)))
    drifted = [place for place, more in enumerate(drift) if more and counts[place]]
    return PromptLevels(
        tuple(_one_per_cause(rising)),
        tuple(wins),
        tuple(base),
        tuple(docs),
        tuple(reach),
        len(drifted),
        max(drifted, key=drift.__getitem__, default=None),
    )


def _one_per_cause(rising: Sequence[tuple[Cause, int]]) -> list[tuple[Cause, int]]:
    """From the top; of several edits for one cause the lowest level counts: it stands below them all."""
    lowest: dict[Cause, int] = {}
    for cause, level in rising:
        lowest.setdefault(cause, level)
    return list(reversed(lowest.items()))


def _total(values: Sequence[int], counts: Sequence[bool]) -> int:
    return sum(value for value, counted in zip(values, counts, strict=True) if counted)


def _tokens(reach: Sequence[Reach], docs: Sequence[PromptDoc], tokens: Sequence[int]) -> list[int]:
    """Bytes in common as tokens, in proportion to each prompt's own length."""
    return [
        one.own_bytes * length // max(1, doc.own_bytes)
        for one, doc, length in zip(reach, docs, tokens, strict=True)
    ]


def _token_reach(sample: Sample, order: Sequence[int]) -> list[int]:
    """Tokens in common with any earlier prompt: token by token where ids are known, else by full blocks."""
    size = sample.trace.block_tokens
    if sample.words and all(one.token_ids is not None for one in sample.words):
        known: dict[bytes, PrefixSet] = {}
        found = []
        for number in order:
            words = sample.words[number]
            space = b"" if words.doc is None else words.doc.name_space
            ids = words.token_ids or ()
            stored = token_bytes(ids + words.reply_ids)
            common, _ = known.setdefault(space, PrefixSet()).add(token_bytes(ids), number, stored)
            found.append(common // TOKEN_BYTES)
        return found
    seen: set[int] = set()
    found = []
    for number in order:
        ids = sample.trace.requests[number].block_ids
        hits = next((place for place, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
        found.append(hits * size)
    return found
