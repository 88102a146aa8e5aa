"""A replica's step time from requests that a running fleet answered: what they took, and how that varies.

A replica asked alone in a quiet moment answers sooner than in a run, where a client, a router and other
replicas share its machine. So the times are those of a run; what the simulation is compared with are others.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from replica.contract.cost_fit import FitError, PrefillPoint, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from sim.outcome import Outcome
from sim.step_time.linear import LinearStepTime
from sim.step_time.noisy import NoisyStepTime, Sample


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
    """From the requests of ``runs`` that had a replica to themselves.

    ``decode`` says how a step grows with its batch; how long it takes is read from the replies. Raises
    ValueError when those requests do not tell.
    """
    found = [outcome for run in runs for outcome in alone(run)]
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


def alone(run: Sequence[Outcome]) -> list[Outcome]:
    """Answered requests of ``run`` during which their replica had no other.

    >>> def row(sent_s, e2e_s, replica):
    ...     return Outcome(sent_s, 100, 10, 0, 0.1, e2e_s, replica)
    >>> run = [row(0.0, 1.0, 0), row(0.5, 1.0, 1), row(2.0, 1.0, 0), row(2.5, 1.0, 0)]
    >>> [outcome.sent_s for outcome in alone(run)]
    [0.0, 0.5]
    """
    found = []
    for replica in {outcome.replica for outcome in run}:
        mine = sorted(
            (outcome for outcome in run if outcome.replica == replica), key=lambda outcome: outcome.sent_s
        )
        busy_until_s = float("-inf")
        for place, outcome in enumerate(mine):
            end_s = outcome.sent_s + outcome.e2e_s
            next_s = mine[place + 1].sent_s if place + 1 < len(mine) else float("inf")
            if outcome.error is None and busy_until_s <= outcome.sent_s and end_s <= next_s:
                found.append(outcome)
            busy_until_s = max(busy_until_s, end_s)
    return sorted(found, key=lambda outcome: outcome.sent_s)
