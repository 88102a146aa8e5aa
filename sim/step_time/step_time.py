"""What stands in for the model: how long one step of a replica takes."""

from typing import Protocol

from replica.batch import Batch, Work
from replica.sequence import Sequence


class StepTime(Protocol):
    """Seconds of a step, from the very batch that the torch runner would get."""

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``; more than 0.

        May read totals, and rows where there are any: a run of decode steps comes as totals alone. Over
        such a run the time has to be about linear in ``decode_context_tokens``.
        """


def cold_prefill_s(step_time: StepTime, prompt_tokens: int, max_batched_tokens: int) -> float:
    """Seconds to prefill a prompt of which nothing is cached, on an idle replica, in chunks.

    Emulated replica, 12,000 tokens in two chunks of at most 8,192:

    >>> from sim.step_time.presets import PRESETS
    >>> round(cold_prefill_s(PRESETS["emufleet"], 12_000, 8_192), 4)
    0.8363
    """
    nobody = Sequence("cold prefill", (), 1)
    seconds = 0.0
    for start in range(0, prompt_tokens, max_batched_tokens):
        count = min(max_batched_tokens, prompt_tokens - start)
        row = Work(nobody, start, count, start + count == prompt_tokens)
        seconds += step_time.seconds(Batch((row,), 0, 0, count))
    return seconds
