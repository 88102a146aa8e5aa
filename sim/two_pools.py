"""KV that moves between simulated replicas: two pools, or replicas that pull prefixes from each other.

The router's own code decides (``router/routing/pools.py``); here is what then happens. A prefill replica
computes the prompt and one token; the one who answers pulls the KV, which takes the transfer's time and room
in its cache while it computes for others, and generates every token, the first included.

The default times of a transfer are llm-d's measurements of pulling KV from a peer (gpt-oss-120b, H200, 2026):
2,048 tokens 35 ms, 8,192 57, 16,384 86, 32,768 165, 49,152 235: about 26 ms + 4.3 µs a token.
"""

from dataclasses import dataclass

from replica.batch import Batch, Work
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from router.routing.kv_route import TRANSFER_FIXED_S, TRANSFER_TOKEN_S, KvPull, Role
from sim.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True)
class KvMoves:
    """Who pulls KV from whom, and how long that takes."""

    decode_replicas: int = 0
    """So many more that answer; the others then compute prompts for them. 0: no pools, all pull from all."""
    transfer_s: float = TRANSFER_FIXED_S
    """Of any KV, however short."""
    transfer_token_s: float = TRANSFER_TOKEN_S
    """Per token, on top."""

    def seconds(self, tokens: int) -> float:
        """Of one transfer.

        >>> round(1e3 * KvMoves().seconds(8_192), 1)
        61.2
        """
        return self.transfer_s + self.transfer_token_s * tokens

    def role(self, replica: int, prefilling: int) -> Role:
        """Of the replica at that position, where the first ``prefilling`` compute."""
        if not self.decode_replicas:
            return Role.BOTH
        return Role.PREFILL if replica < prefilling else Role.DECODE

    def pull(self, replica: int, prefilling: int) -> KvPull:
        """How that replica gets KV."""
        role = self.role(replica, prefilling)
        return KvPull.NONE if role is Role.PREFILL else KvPull.WARMROUTE


class Moved:
    """What a request's sequence carries as ``parameters``: how much of its KV was pulled."""

    __slots__ = ("moved_tokens",)

    def __init__(self) -> None:
        self.moved_tokens = 0
        """The first so many tokens have their KV where it runs, whatever blocks say of them."""


@dataclass(frozen=True, slots=True)
class PulledStepTime:
    """Steps of replicas that pull. A block that came in part costs nothing again.

    Blocks of a trace are long (Mooncake's have 512 tokens) and hit whole or not at all; engines' have 16. So
    that the size of a trace's blocks does not count, of a prompt that was pulled only its last token is
    computed.
    """

    step_time: StepTime

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``."""
        prefills = batch.prefills
        if not any(_moved(row.sequence) > row.start for row in prefills):
            return self.step_time.seconds(batch)
        left = [row for row in map(_left, prefills) if row.count]
        rows = [*batch.decodes, *left]
        tokens = sum(row.count for row in left)
        return self.step_time.seconds(
            Batch(rows, batch.decode_sequences, batch.decode_context_tokens, tokens)
        )


def _moved(sequence: Sequence) -> int:
    carried = sequence.parameters
    return carried.moved_tokens if isinstance(carried, Moved) else 0


def _left(row: Work) -> Work:
    start = max(row.start, min(_moved(row.sequence), row.start + row.count))
    return Work(row.sequence, start, row.start + row.count - start, row.samples)


def pullable_tokens(sequence: Sequence, source: Scheduler, destination: Scheduler) -> tuple[int, int]:
    """Tokens in whole blocks that ``source`` holds of the prompt; those of them ``destination`` lacks."""
    size = source.cache.block_size
    there = len(source.cache.match(sequence)) * size
    here = len(destination.cache.match(sequence)) * size
    return there, max(0, there - here)
