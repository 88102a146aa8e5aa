"""A replica's step time from requests that a running fleet answered: what they took, and how that varies.

A replica asked alone in a quiet moment answers sooner than in a run, where a client, a router and other
replicas share its machine. So the times are those of a run; what the simulation is compared with are others.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from replica.contract.cost_fit import FitError, PrefillPoint, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from sim.outcome import Outcome
from sim.step_time.linear import LinearStepTime
from sim.step_time.noisy import NoisyStepTime, Sample
from sim.workload.trace import Trace

TUNINGS = 4
"""Each leaves a few per cent of what the one before left."""


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """What work costs there, and how measured prefills differed from it."""

    prefill: PrefillCost
    prefill_error: FitError
    decode: DecodeCost
    samples: tuple[Sample, ...]

    def step_time(self, seed: int) -> NoisyStepTime:
        """With noise drawn from ``seed``."""
        prefill, decode = self.prefill, self.decode
        steady = LinearStepTime(
            step_s=decode.fixed_s,
            decode_sequence_s=decode.per_sequence_s,
            prefill_token_s=prefill.per_token_s,
            attention_tokens=prefill.attention_tokens,
            prefill_step_s=max(0.0, prefill.fixed_s - decode.fixed_s),
        )
        return NoisyStepTime(steady, self.samples, random.Random(f"{seed} step times"))


def replica_model(runs: Sequence[Sequence[Outcome]], decode: DecodeCost) -> ReplicaModel:
    """From the requests of ``runs`` that found their replica with nothing to do.

    Not from those that had it to themselves to the end: such are the quick ones. ``decode`` says how a step
    grows with its batch; how long it takes is read from the replies, roughly (``tuned``). Raises ValueError
    when those requests do not tell.
    """
    found = [outcome for run in runs for outcome in found_idle(run)]
    points = [
        PrefillPoint(
            max(1, outcome.prompt_tokens - outcome.cached_tokens), outcome.cached_tokens, outcome.ttft_s
        )
        for outcome in found
        if outcome.ttft_s is not None
    ]
    prefill, error = fit_prefill(points)
    steps = [outcome.tpot_s for outcome in found if outcome.tpot_s is not None]
    slower = fmean(steps) / decode.step_seconds(1) if steps else 1.0
    samples = []
    for point in points:
        expected_s = prefill.seconds(point.new_tokens, point.position)
        samples.append(Sample(expected_s, point.seconds / expected_s))
    return ReplicaModel(
        prefill,
        error,
        DecodeCost(decode.fixed_s * slower, decode.per_sequence_s * slower),
        tuple(samples),
    )


def found_idle(run: Sequence[Outcome]) -> list[Outcome]:
    """Answered requests of ``run`` that came when their replica had no other; others may have come after.

    >>> def row(sent_s, e2e_s, replica):
    ...     return Outcome(sent_s, 100, 10, 0, 0.1, e2e_s, replica)
    >>> run = [row(0.0, 1.0, 0), row(0.5, 1.0, 1), row(2.0, 1.0, 0), row(2.5, 1.0, 0)]
    >>> [outcome.sent_s for outcome in found_idle(run)]
    [0.0, 0.5, 2.0]
    """
    found = []
    for replica in {outcome.replica for outcome in run}:
        mine = sorted(
            (outcome for outcome in run if outcome.replica == replica), key=lambda outcome: outcome.sent_s
        )
        busy_until_s = float("-inf")
        for outcome in mine:
            if outcome.error is None and busy_until_s <= outcome.sent_s:
                found.append(outcome)
            busy_until_s = max(busy_until_s, outcome.sent_s + outcome.e2e_s)
    return sorted(found, key=lambda outcome: outcome.sent_s)


def tuned(
    model: ReplicaModel,
    runs: Sequence[tuple[Trace, Sequence[Outcome]]],
    simulated: Callable[[ReplicaModel, Trace], Sequence[Outcome]],
) -> ReplicaModel:
    """``model`` with decode steps so long that ``runs``, simulated, decode for as long as they did.

    A reply is also held up by prompts that come meanwhile, and by whatever else its machine does for others:
    no single reply tells which. ``simulated`` gives the outcomes of one trace.
    """
    answered = [outcome for _, run in runs for outcome in run if outcome.error is None]
    if not any(_decode_s(outcome) for outcome in answered):
        return model
    live_s = fmean(map(_decode_s, answered))
    for _ in range(TUNINGS):
        made_s = fmean(_decode_s(outcome) for trace, _ in runs for outcome in simulated(model, trace))
        slower = live_s / made_s
        decode = model.decode
        model = replace(model, decode=DecodeCost(decode.fixed_s * slower, decode.per_sequence_s * slower))
    return model


def _decode_s(outcome: Outcome) -> float:
    return 0.0 if outcome.ttft_s is None else outcome.e2e_s - outcome.ttft_s
