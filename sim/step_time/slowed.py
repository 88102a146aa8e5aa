"""A replica that is slower or faster than the others, by one factor in everything."""

from dataclasses import dataclass

from replica.batch import Batch
from sim.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True)
class SlowedStepTime:
    """Every step takes ``factor`` times as long.

    >>> from sim.step_time.presets import PRESETS
    >>> round(1e3 * SlowedStepTime(PRESETS["emufleet"], 2.5).seconds(Batch((), 20, 0, 0)), 2)
    23.0
    """

    step_time: StepTime
    factor: float

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``."""
        return self.factor * self.step_time.seconds(batch)
