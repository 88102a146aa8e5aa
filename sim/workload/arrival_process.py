"""When requests come: Poisson, or Gamma with more or less bunching; for any timed trace."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sim.workload.trace import Trace, TraceError


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Independent gaps with a coefficient of variation: 1 is Poisson, 0 a metronome, 3 comes in bursts.

    >>> ArrivalProcess.parse("gamma:3").variation, ArrivalProcess.parse("poisson").variation
    (3.0, 1.0)
    """

    variation: float = 1.0
    """Standard deviation of the gaps over their mean."""

    @classmethod
    def parse(cls, text: str) -> "ArrivalProcess":
        """From ``poisson`` or ``gamma:VARIATION``. Raises ValueError."""
        kind, _, value = text.partition(":")
        try:
            variation = float(value) if kind == "gamma" else 1.0
            if kind not in ("poisson", "gamma") or (kind == "poisson" and value) or not 0 <= variation < 1e3:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"{text!r}; expected poisson, or gamma:VARIATION, the gaps' standard deviation over their "
                "mean, such as gamma:3"
            ) from None
        return cls(variation)

    def times_s(self, per_s: float, rng: random.Random) -> Iterator[float]:
        """Arrival times from 0 on, ``per_s`` a second, without end."""
        mean_s = 1.0 / per_s
        square = self.variation**2
        now = 0.0
        while True:
            yield now
            now += rng.gammavariate(1.0 / square, mean_s * square) if square else mean_s


POISSON = ArrivalProcess()


def retimed(trace: Trace, process: ArrivalProcess, seed: int) -> Trace:
    """The same requests in the same order and at the same mean rate, at times of another process.

    Raises ``TraceError`` for a trace of sessions, whose turns follow one another.
    """
    if trace.in_sessions:
        raise TraceError(
            f"{trace.name}: turns of sessions follow their answers; they cannot be given other times"
        )
    times = [request.timestamp_ms or 0.0 for request in trace.requests]
    span_s = (max(times) - min(times)) / 1e3
    per_s = len(times) / span_s if span_s else 1.0
    made = process.times_s(per_s, random.Random(f"{seed} arrivals"))
    requests = tuple(
        replace(request, timestamp_ms=1e3 * time_s)
        for request, time_s in zip(trace.requests, made, strict=False)
    )
    return replace(trace, requests=requests)
