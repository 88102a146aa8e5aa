"""Fits the roofline's efficiencies to measured runs: the whole run is simulated at every try.

Six hundred times of one run do not tell bandwidth from launch costs, so expectations go in: leaving one by
its usual spread costs as much as one percent of error (a ridge).

What is fitted are shares of what the GPU was measured to reach, and what a step costs beside its kernels.
None of them belongs to one GPU, so a fit to one run holds on another.
"""

from collections.abc import Sequence
from math import log

from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from sim.fidelity.measured_run import MeasuredRun
from sim.fidelity.rerun import rerun
from sim.outcome import Outcome
from sim.step_time.simplex import Point, minimize

EXPECTED = (
    # name, expected value, usual spread of its logarithm
    ("math", 0.90, 0.10),
    ("bandwidth", 0.95, 0.05),
    ("kv_bandwidth", 0.90, 0.15),
    ("step_s", 2e-3, 0.50),
    ("sequence_s", 30e-6, 0.50),
)
RIDGE = 0.01
SHORTEST_S = 0.2
"""Added to both times to first token before they are compared: milliseconds do not outweigh minutes."""
TPOT_WEIGHT = 2.0


def roofline_of(run: MeasuredRun, efficiency: Efficiency | None = None) -> RooflineStepTime:
    """The step-time model of the run's model and GPU."""
    return RooflineStepTime.of(run.model, run.gpu, tensor_parallel=run.tensor_parallel, efficiency=efficiency)


def simulated(run: MeasuredRun, efficiency: Efficiency) -> list[Outcome]:
    """The run again with ``efficiency``; KV room as recorded, else what fits the GPU."""
    model = roofline_of(run, efficiency)
    return rerun(run, model, run.kv_tokens or model.kv_capacity_tokens())


def fit_efficiency(
    runs: Sequence[MeasuredRun], *, first_share: float = 1.0, evaluations: int = 50
) -> Efficiency:
    """The efficiencies under which ``runs`` come out as measured, judged by the first share of requests.

    Deterministic. Cost: ``evaluations`` simulations of every run.
    """

    def error(point: Point) -> float:
        if max(point[:3]) > 1.0:
            return 10.0 * max(point[:3])
        efficiency = _efficiency(point)
        misses = [_miss(run.outcomes, simulated(run, efficiency), first_share) for run in runs]
        return sum(misses) / len(misses) + RIDGE * sum(
            (log(value / expected) / spread) ** 2
            for value, (_, expected, spread) in zip(point, EXPECTED, strict=True)
        )

    point, _ = minimize(
        error, [expected for _, expected, _ in EXPECTED], evaluations=evaluations, spread=0.05
    )
    return _efficiency(point)


def _efficiency(point: Point) -> Efficiency:
    return Efficiency(**{name: value for value, (name, _, _) in zip(point, EXPECTED, strict=True)})


def _miss(measured: Sequence[Outcome], made: Sequence[Outcome], first_share: float) -> float:
    """Mean relative difference of a request's times; logarithms, so that half and double weigh alike."""
    count = max(1, int(len(measured) * first_share))
    total = 0.0
    for real, ours in zip(measured[:count], made[:count], strict=True):
        if real.ttft_s is None or ours.ttft_s is None:
            return 10.0
        total += abs(log((ours.ttft_s + SHORTEST_S) / (real.ttft_s + SHORTEST_S)))
        total += abs(log(ours.e2e_s / real.e2e_s))
        if real.tpot_s and ours.tpot_s:
            total += TPOT_WEIGHT * abs(log(ours.tpot_s / real.tpot_s))
    return total / count
