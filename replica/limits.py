"""How much one step may hold, and which requests are refused at arrival because they can never fit."""

from dataclasses import dataclass
from typing import Any

from replica.contract.multimodal import check_items
from replica.kv_cache.cache import Cache
from replica.sequence import Sequence, Status

LEAST = {
    "max_running": 1,
    "max_model_len": 2,
    "spare_blocks": 0,
    "max_chunk_tokens": 1,
    "max_overtaken": 0,
    "pinned_blocks": 0,
}


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
    max_chunk_tokens: int | None = None
    """Positions of one prefill in one step, so that several prefills share a step's budget; None: no cap."""
    longest_prefix_first: bool = False
    """Admit, within a priority, the longest cached prefix first instead of the earliest arrival."""
    max_overtaken: int = 16
    """How often a request may be overtaken so before it is next."""
    shares_prefills: bool = True
    """Of requests with one new prefix the first computes it and the others wait; else each computes it."""
    pinned_blocks: int = 0
    """Blocks that the hottest prefixes may keep from eviction; 0: none."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: give at least {least}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens {self.max_batched_tokens} is less than max_running {self.max_running}: "
                "every running sequence needs a token per step"
            )


class RequestTooLong(ValueError):
    """A request that can never run here; refused at arrival, with its numbers in the message."""

    def __init__(self, sequence: Sequence, limit_tokens: int, limit_name: str) -> None:
        """``limit_name`` is "max_model_len" or "KV pool"."""
        self.prompt_tokens = sequence.prompt_tokens
        self.max_tokens = sequence.max_tokens
        self.limit_tokens = limit_tokens
        self.limit_name = limit_name
        super().__init__(
            f"request {sequence.request_id}: {self.prompt_tokens} prompt tokens and max_tokens "
            f"{self.max_tokens} make {self.prompt_tokens + self.max_tokens}, the {limit_name} holds "
            f"{limit_tokens}; shorten the prompt or lower max_tokens"
        )


def check_request(sequence: Sequence, limits: SchedulerLimits, cache: Cache[Any]) -> None:
    """Raise unless the sequence is new and can finish here.

    Raises RequestTooLong when it never could: prompt and max_tokens beyond max_model_len, or beyond the whole
    pool. Raises ValueError for an empty prompt, max_tokens below 1, a sequence that was used before, block
    ids of another block size, or images that overlap or lie outside the prompt.
    """
    name = sequence.request_id
    if sequence.status is not Status.WAITING:
        raise ValueError(f"request {name} is {sequence.status.value}: make a new Sequence")
    if sequence.prompt_tokens < 1 or sequence.max_tokens < 1:
        raise ValueError(
            f"request {name}: {sequence.prompt_tokens} prompt tokens, max_tokens {sequence.max_tokens}; "
            "both must be at least 1"
        )
    if sequence.id_block_size not in (None, cache.block_size):
        raise ValueError(
            f"request {name}: ids name blocks of {sequence.id_block_size} tokens, "
            f"the cache has blocks of {cache.block_size}"
        )
    if sequence.multimodal:
        check_items(sequence.multimodal, sequence.prompt_tokens)
    if sequence.prompt_tokens + sequence.max_tokens > limits.max_model_len:
        raise RequestTooLong(sequence, limits.max_model_len, "max_model_len")
    # The last token is never fed back, so its KV needs no room.
    if cache.blocks_for(sequence.prompt_tokens + sequence.max_tokens - 1) > cache.blocks:
        raise RequestTooLong(sequence, cache.blocks * cache.block_size + 1, "KV pool")
