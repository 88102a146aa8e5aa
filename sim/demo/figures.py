"""From the records of one run to its figures: the common result, and what only the demo shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sim.bounds import InfiniteCache
from sim.demo.play_script import RequestRecord
from sim.outcome import Outcome
from sim.results import Result, Slo, summarize

IDEAL_BLOCK_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """One policy's run. Token counts are what the replicas reported, times what the clients saw."""

    result: Result
    prompt_tokens: int
    cached_tokens: int
    burst_ttft_p50_s: float | None
    """Of the conversations with the system prompt that became popular."""
    saved_prefill_ms: float
    """Cached tokens times what a token's prefill cost on an idle replica at the start."""

    def json_object(self) -> dict[str, Any]:
        """INTERFACE's result object and the demo's own figures."""
        burst = self.burst_ttft_p50_s
        return self.result.json_object() | {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "burst_ttft_p50_s": None if burst is None else round(burst, 4),
            "saved_prefill_ms": round(self.saved_prefill_ms, 1),
        }


def demo_figures(
    policy: str, records: Sequence[RequestRecord], replicas: Sequence[str], prefill_s_per_token: float
) -> DemoFigures:
    """Sum up a run: ``records`` in the order they were sent, ``replicas`` the names of all replicas."""
    outcomes = [_outcome(record, replicas) for record in records]
    result = summarize(
        policy,
        outcomes,
        replicas=len(replicas),
        slo=Slo(),
        cold_prefill_s=lambda tokens: tokens * prefill_s_per_token,
        warmup_share=0.0,
        ideal=ideal_cached_share(records),
    )
    good = [outcome for outcome in outcomes if outcome.error is None]
    cached_tokens = sum(outcome.cached_tokens for outcome in good)
    burst = sorted(r.answer.ttft_s for r in records if r.in_burst and r.answer.ttft_s is not None)
    return DemoFigures(
        result=result,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=cached_tokens,
        burst_ttft_p50_s=burst[len(burst) // 2] if burst else None,
        saved_prefill_ms=cached_tokens * prefill_s_per_token * 1_000.0,
    )


def _outcome(record: RequestRecord, replicas: Sequence[str]) -> Outcome:
    answer = record.answer
    return Outcome(
        sent_s=record.sent_at_s,
        prompt_tokens=answer.prompt_tokens or 0,
        output_tokens=answer.output_tokens or 0,
        cached_tokens=answer.cached_tokens or 0,
        ttft_s=answer.ttft_s,
        e2e_s=answer.e2e_s,
        replica=replicas.index(answer.replica) if answer.replica in replicas else None,
        spilled=answer.reason == "spill",
        error=answer.error,
    )


def ideal_cached_share(records: Sequence[RequestRecord]) -> float | None:
    """What one cache that forgets nothing would have had, in characters of prompt text.

    Prompts and answers count as cached from then on: the next turn begins with both.
    """
    cache = InfiniteCache(IDEAL_BLOCK_CHARACTERS)
    hit = total = 0
    for record in records:
        if record.answer.error is not None:
            continue
        prompt = "".join(f"<{message['role']}>{message['content']}" for message in record.messages)
        hit += cache.arrived(_block_ids(prompt), len(prompt))
        total += len(prompt)
        whole = f"{prompt}<assistant>{record.answer.text}"
        cache.arrived(_block_ids(whole), len(whole))
    return hit / total if total else None


def _block_ids(text: str) -> list[int]:
    """An id per whole block of characters that also names everything before it."""
    size = IDEAL_BLOCK_CHARACTERS
    pieces = (text[start : start + size] for start in range(0, len(text) - size + 1, size))
    return list(accumulate(pieces, lambda before, piece: hash((before, piece)), initial=0))[1:]
