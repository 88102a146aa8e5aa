"""What runs in the next step: continuous batching with chunked prefill under one token budget."""

from collections import abc
from dataclasses import dataclass

from replica.batch import Batch
from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.kv_cache.prefix_cache import PrefixCache
from replica.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much one step may hold.

    ``max_batched_tokens`` must be at least ``max_running``, so that every running decode fits in a step
    and a prefill beside them always gets a token. Raises ValueError otherwise.
    """

    max_running: int = 64
    """Sequences that hold blocks at once."""
    max_batched_tokens: int = 2048
    """Positions computed in one step, decodes and prefill chunks together."""
    max_model_len: int = 8192
    """Prompt and output tokens of one sequence together."""
    spare_blocks: int = 0
    """Blocks an admission must leave free for running sequences to grow into (ignored when none run)."""


class RequestTooLong(ValueError):
    """A request that can never run here; refused at arrival, with its numbers in the message.

    Attributes ``needed`` and ``limit`` are tokens; ``limit_name`` says which limit ("max_model_len" or
    "kv_pool").
    """

    def __init__(
        self, request_id: str, prompt_tokens: int, max_tokens: int, limit: int, limit_name: str
    ) -> None:
        super().__init__(request_id)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.needed = prompt_tokens + max_tokens
        self.limit = limit
        self.limit_name = limit_name


class Scheduler:
    """Owns the waiting and running sequences; every step is ``batch = schedule()``, run it, ``commit``.

    One batch is in flight at a time: ``schedule`` again before ``commit`` raises RuntimeError. ``abort``
    and ``finish`` may come in between; the batch's rows for that sequence are then dropped by ``commit``.
    """

    def __init__(self, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Raises RequestTooLong when it can never fit, ValueError when it makes no sense."""
        raise NotImplementedError

    def schedule(self) -> Batch:
        """Choose the next step's rows and take the blocks they need (may preempt). Empty if none can run."""
        raise NotImplementedError

    def commit(
        self, batch: Batch, sampled: abc.Mapping[str, int] | abc.Sequence[int] | None = None
    ) -> list[Sequence]:
        """The step is done: advance, publish full blocks, append tokens; return who reached max_tokens.

        ``sampled``: request id to token, or tokens in the order of the rows with ``samples``; None for
        sequences made from block ids. Other stop conditions are the engine's: it calls ``finish``.
        """
        raise NotImplementedError

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and release its blocks (they stay hittable). Finishing twice does nothing."""
        raise NotImplementedError

    def abort(self, request_id: str) -> Sequence | None:
        """End a request wherever it is (reason "abort"); None when it is not here (any more)."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Somebody waits or runs."""
        raise NotImplementedError

    def steps_until_change(self) -> int:
        """How many decode-only steps can run with the same rows; 0 when the next step needs ``schedule``.

        In the last of them sequences may finish. A lower bound: it may be less than the truth.
        """
        raise NotImplementedError

    def decode_batch(self, ahead: int = 0) -> Batch:
        """Totals (no rows) of the decode-only step that comes ``ahead`` steps after the next one."""
        raise NotImplementedError

    def advance_decodes(self, steps: int) -> list[Sequence]:
        """Do ``steps <= steps_until_change()`` decode steps at once, with the effect of schedule and commit.

        Only for sequences made from block ids. Returns who finished, in the last of the steps.
        """
        raise NotImplementedError

    def load(self) -> LoadReport:
        """Waiting, running, KV usage, prefix queries and hits in tokens, capacity."""
        raise NotImplementedError

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, in order."""
        raise NotImplementedError

    def reset_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes; False (and nothing changed) while blocks are in use, unless
        ``preempt_running``, which preempts everybody first (outputs in flight are dropped)."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raise AssertionError unless cache, tables, queues and counts agree. O(everything); for tests."""
        raise NotImplementedError
