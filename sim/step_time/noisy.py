"""A step time that varies as measured ones did."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from replica.batch import Batch
from sim.step_time.step_time import StepTime

ALIKE = 32
"""Measurements of the most similar length that one is drawn from."""


@dataclass(frozen=True, slots=True, order=True)
class Sample:
    """One measured prefill: what the model says it takes, and how many times that it took."""

    expected_s: float
    ratio: float


class NoisyStepTime:
    """``step_time``, each step with prefill in it times the ratio of a measured prefill of about its length.

    Steps that decode alone keep the model's time: a reply has many, and they even out.

    >>> from sim.step_time.presets import PRESETS
    >>> from replica.batch import Work
    >>> from replica.sequence import Sequence
    >>> noisy = NoisyStepTime(PRESETS["emufleet"], [Sample(0.08, 1.5)], random.Random(1))
    >>> chunk = Work(Sequence("a", (), 1), start=0, count=1_000, samples=True)
    >>> round(1e3 * PRESETS["emufleet"].seconds(Batch((chunk,), 0, 0, 1_000)), 1)
    71.0
    >>> round(1e3 * noisy.seconds(Batch((chunk,), 0, 0, 1_000)), 1)
    106.5
    >>> round(1e3 * noisy.seconds(Batch((), 20, 0, 0)), 1)
    9.2
    """

    def __init__(self, step_time: StepTime, samples: Sequence[Sample], rng: random.Random) -> None:
        self._step_time = step_time
        self._samples = sorted(samples)
        self._rng = rng

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``; the next draw."""
        seconds = self._step_time.seconds(batch)
        if not batch.prefill_tokens or not self._samples:
            return seconds
        at = bisect_left(self._samples, Sample(seconds, 0.0)) - ALIKE // 2
        first = max(0, min(at, len(self._samples) - ALIKE))
        return seconds * self._rng.choice(self._samples[first : first + ALIKE]).ratio
