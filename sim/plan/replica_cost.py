"""What one replica costs and holds, in the few numbers that a plan calculates with."""

from dataclasses import dataclass

from replica.batch import Batch
from replica.contract.roofline.roofline import RooflineStepTime
from sim.simulated_replica import ReplicaSettings
from sim.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """Prefill of m tokens that follow h cached ones takes::

        max(step_ms, fixed_ms + m * token_us * (1 + (h + m / 2) / attention_tokens) / 1000)    milliseconds

    and a decode step of B sequences, milliseconds::

        max(step_ms, fixed_ms + B * math_us / 1000) + B * (sequence_us + context * context_ns / 1000) / 1000

    Worked example, 32 µs a token, no attention term, 2,900 of 3,300 tokens cached:

    >>> cost = ReplicaCost(step_ms=8.0, fixed_ms=0.0, token_us=32.0, sequence_us=60.0)
    >>> cost.prefill_ms(3_300), cost.prefill_ms(400, 2_900), cost.prefill_ms(1)
    (105.6, 12.8, 8.0)
    """

    step_ms: float
    """Of every step, whatever is in it: weights read, overhead."""
    fixed_ms: float
    token_us: float
    sequence_us: float
    attention_tokens: float | None = None
    """``None``: prefill is linear."""
    context_ns: float = 0.0
    """Per token of context that a decoding sequence reads."""
    math_us: float = 0.0
    """Math of one decoding sequence; while it is hidden behind reading weights it costs nothing."""
    kv_tokens: float = 400_000.0
    kv_bytes: float = 131_072.0
    """Per token."""
    gpus: int = 1
    roofline: RooflineStepTime | None = None
    """What the figures above are the closed form of; the simulator uses it in their place."""
    max_running: int = 256
    max_batched_tokens: int = 8_192

    def prefill_ms(self, new_tokens: float, position: float = 0.0) -> float:
        """Milliseconds to prefill ``new_tokens`` that follow ``position`` cached ones."""
        growth = 1.0
        if self.attention_tokens is not None:
            growth += (position + new_tokens / 2.0) / self.attention_tokens
        return max(self.step_ms, self.fixed_ms + new_tokens * self.token_us * growth / 1e3)

    def prefill_formula(self, new_tokens: str, position: str = "0") -> str:
        """The same for a worksheet that knows this replica's quantities by their names."""
        work = f"{new_tokens} * token_us"
        if self.attention_tokens is not None:
            work += f" * (1 + ({position} + {new_tokens} / 2) / attention_tokens)"
        return f"max(step_ms, fixed_ms + {work} / 1000)"

    def step_time(self) -> StepTime:
        """How long a step takes, for the simulator."""
        return self.roofline or ImpliedStepTime(self)

    def settings(self) -> ReplicaSettings:
        """Room and limits, for the simulator."""
        return ReplicaSettings(
            capacity_tokens=int(self.kv_tokens),
            max_batched_tokens=max(self.max_batched_tokens, self.max_running),
            max_running=self.max_running,
            max_model_len=max(1, int(self.kv_tokens)),
        )


@dataclass(frozen=True, slots=True)
class ImpliedStepTime:
    """The step time that a plan's arithmetic implies.

    Reading the weights goes on beside the math, so a step takes the longer of the two; KV is read on top.

    >>> from replica.batch import Work
    >>> from replica.sequence import Sequence
    >>> step = ReplicaCost(step_ms=8.0, fixed_ms=0.0, token_us=32.0, sequence_us=60.0).step_time()
    >>> chunk = Work(Sequence("a", (), 1), start=2_900, count=400, samples=True)
    >>> round(1000 * step.seconds(Batch((), 20, 66_000, 0)), 2)                # decode: 8 + 20 * 0.06
    9.2
    >>> round(1000 * step.seconds(Batch((chunk,), 0, 0, 400)), 2)              # prefill: 400 * 0.032
    12.8
    """

    cost: ReplicaCost

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``."""
        cost = self.cost
        math_us = cost.fixed_ms * 1e3 + cost.math_us * batch.decode_sequences
        for chunk in batch.prefills:
            growth = 1.0
            if cost.attention_tokens is not None:
                growth += (chunk.start + chunk.count / 2.0) / cost.attention_tokens
            math_us += chunk.count * cost.token_us * growth
        kv_us = (
            cost.sequence_us * batch.decode_sequences + cost.context_ns * batch.decode_context_tokens / 1e3
        )
        return (max(cost.step_ms * 1e3, math_us) + kv_us) / 1e6
