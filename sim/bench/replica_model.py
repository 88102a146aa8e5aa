"""A replica's step time from requests that a running fleet answered: what they took, and how that varies.

A replica asked alone in a quiet moment answers sooner than in a run, where a client, a router and other
replicas share its machine. So the times are those of a run; what the simulation is compared with are others.
A machine that others use, too, is slower in one minute than in the next: each run has its pace.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean, pvariance

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
    paces: tuple[float, ...] = ()
    """Of each run it was read from: how many times what is usual everything took there."""

    def at_pace(self, pace: float) -> "ReplicaModel":
        """Everything takes ``pace`` times as long."""
        prefill, decode = self.prefill, self.decode
        return replace(
            self,
            prefill=replace(prefill, fixed_s=pace * prefill.fixed_s, per_token_s=pace * prefill.per_token_s),
            decode=DecodeCost(pace * decode.fixed_s, pace * decode.per_sequence_s),
            samples=tuple(Sample(pace * one.expected_s, one.ratio) for one in self.samples),
        )

    def step_time(self, seed: int) -> NoisyStepTime:
        """With noise drawn from ``seed``.

        A step with a prefill has that one's fixed part in place of a decode step's, which may be the larger:
        in one forward pass replies that decode are a few rows more.
        """
        prefill, decode = self.prefill, self.decode
        steady = LinearStepTime(
            step_s=decode.fixed_s,
            decode_sequence_s=decode.per_sequence_s,
            prefill_token_s=prefill.per_token_s,
            attention_tokens=prefill.attention_tokens,
            prefill_step_s=prefill.fixed_s - decode.fixed_s,
        )
        return NoisyStepTime(steady, self.samples, random.Random(f"{seed} step times"))


def replica_model(runs: Sequence[Sequence[Outcome]], decode: DecodeCost) -> ReplicaModel:
    """From the requests of ``runs`` that found their replica with nothing to do.

    Not from those that had it to themselves to the end: such are the quick ones. ``decode`` says how a step
    grows with its batch; how long it takes is read from the replies, roughly (``tuned``). Raises ValueError
    when those requests do not tell.
    """
    found = [[outcome for outcome in found_idle(run) if outcome.ttft_s is not None] for run in runs]
    points = [[_point(outcome) for outcome in run] for run in found]
    rough, _ = fit_prefill([point for run in points for point in run])
    paces = relative_paces(
        [[point.seconds / rough.seconds(point.new_tokens, point.position) for point in run] for run in points]
    )
    even = [
        PrefillPoint(point.new_tokens, point.position, point.seconds / pace)
        for run, pace in zip(points, paces, strict=True)
        for point in run
    ]
    prefill, error = fit_prefill(even)
    steps = [
        outcome.tpot_s / pace
        for run, pace in zip(found, paces, strict=True)
        for outcome in run
        if outcome.tpot_s is not None
    ]
    slower = fmean(steps) / decode.step_seconds(1) if steps else 1.0
    samples = []
    for point in even:
        expected_s = prefill.seconds(point.new_tokens, point.position)
        samples.append(Sample(expected_s, point.seconds / expected_s))
    return ReplicaModel(
        prefill,
        error,
        DecodeCost(decode.fixed_s * slower, decode.per_sequence_s * slower),
        tuple(samples),
        paces,
    )


def _point(outcome: Outcome) -> PrefillPoint:
    assert outcome.ttft_s is not None
    new_tokens = max(1, outcome.prompt_tokens - outcome.cached_tokens)
    return PrefillPoint(new_tokens, outcome.cached_tokens, outcome.ttft_s)


def relative_paces(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """How slow each run was beside the others; ``runs`` are measured over expected times.

    Few requests tell a mean that differs by chance: of a difference counts the share that is more than runs
    of one pace would show (empirical Bayes, in logarithms).

    >>> [round(pace, 2) for pace in relative_paces([[1.0, 1.1, 0.9] * 20, [2.0, 2.2, 1.8] * 20])]
    [0.71, 1.41]
    >>> [round(pace, 2) for pace in relative_paces([[1.0, 4.0, 1.0], [4.0, 1.0, 4.0]])]
    [1.0, 1.0]
    """
    logs = [[log(ratio) for ratio in run] for run in runs]
    told = [run for run in logs if len(run) > 1]
    if len(told) < 2:
        return (1.0,) * len(runs)
    usual = fmean(fmean(run) for run in told)
    apart = pvariance([fmean(run) for run in told])
    between = max(0.0, apart - fmean(pvariance(run) / (len(run) - 1) for run in told))
    paces = []
    for run in logs:
        chance = pvariance(run) / (len(run) - 1) if len(run) > 1 else float("inf")
        counts = between / (between + chance) if between else 0.0
        paces.append(exp(counts * (fmean(run) - usual)) if counts else 1.0)
    return tuple(paces)


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
    no single reply tells which. ``runs`` are those that ``model`` was read from, ``simulated`` gives the
    outcomes of one trace.
    """
    answered = [outcome for _, run in runs for outcome in run if outcome.error is None]
    if not any(_decode_s(outcome) for outcome in answered):
        return model
    live_s = fmean(map(_decode_s, answered))
    for _ in range(TUNINGS):
        made_s = fmean(
            _decode_s(outcome)
            for (trace, _), pace in zip(runs, model.paces, strict=True)
            for outcome in simulated(model.at_pace(pace), trace)
        )
        slower = live_s / made_s
        decode = model.decode
        model = replace(model, decode=DecodeCost(decode.fixed_s * slower, decode.per_sequence_s * slower))
    return model


def _decode_s(outcome: Outcome) -> float:
    return 0.0 if outcome.ttft_s is None else outcome.e2e_s - outcome.ttft_s
