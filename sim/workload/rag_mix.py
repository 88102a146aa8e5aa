"""Retrieval: a system prompt, a few passages of a corpus, a question.

The order of the passages decides what can be reused: the same ones in another order share nothing after the
first that differs.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from sim.workload.arrival_process import POISSON, ArrivalProcess
from sim.workload.block_names import BlockNames, Segment
from sim.workload.lengths import tokens
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RagMix:
    """What the requests look like. Lengths in tokens are medians of log-normal draws."""

    corpus: int = 500
    """Passages."""
    passages: int = 5
    """Per request."""
    zipf: float = 1.1
    """The k-th passage's popularity is proportional to ``1 / k ** zipf``."""
    sorted_passages: bool = False
    """Passages in one fixed order, as a stable sort by their id gives; else as the retriever ranked them."""
    system_tokens: int = 800
    passage_tokens: int = 400
    question_tokens: int = 60
    output_tokens: int = 150
    spread: float = 0.4
    per_s: float = 8.0
    process: ArrivalProcess = POISSON


def rag_trace(mix: RagMix | None = None, *, requests: int = 2_000, seed: int = 1) -> Trace:
    """Timed requests made from ``seed``; both orders retrieve the same passages at the same times."""
    mix = mix or RagMix()
    rng = random.Random(f"{seed} rag")
    names = BlockNames(BLOCK_TOKENS)
    lengths = [tokens(rng, mix.passage_tokens, mix.spread) for _ in range(mix.corpus)]
    popularity = list(accumulate(1.0 / rank**mix.zipf for rank in range(1, mix.corpus + 1)))
    times = mix.process.times_s(mix.per_s, random.Random(f"{seed} rag arrivals"))
    made = []
    for number in range(requests):
        found = list(_retrieve(rng, mix, popularity))
        question, output = (
            tokens(rng, middle, mix.spread) for middle in (mix.question_tokens, mix.output_tokens)
        )
        if mix.sorted_passages:
            found.sort()
        segments: list[Segment] = [
            ("system", mix.system_tokens),
            *((passage, lengths[passage]) for passage in found),
        ]
        segments.append((("question", number), question))
        total = sum(length for _, length in segments)
        made.append(TraceRequest(total, output, names.ids(segments), timestamp_ms=1e3 * next(times)))
    order = "sorted" if mix.sorted_passages else "in any order"
    return Trace(f"rag, passages {order}", BLOCK_TOKENS, tuple(made))


def _retrieve(rng: random.Random, mix: RagMix, popularity: list[float]) -> Iterator[int]:
    """Distinct passages, the popular ones more often, in the order in which they are drawn."""
    seen: set[int] = set()
    while len(seen) < min(mix.passages, mix.corpus):
        (passage,) = rng.choices(range(mix.corpus), cum_weights=popularity)
        if passage not in seen:
            seen.add(passage)
            yield passage
