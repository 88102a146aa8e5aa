"""One request inside a replica: its tokens, its limits, how far it is computed, which blocks it holds."""

from collections import abc
from enum import Enum

from replica.contract.block_hash import root_frame
from replica.contract.kv_events import BlockHash
from replica.contract.multimodal import MultimodalItem


class Status(Enum):
    """Where a sequence is. A preempted one waits like a new one, but has output to recompute."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """A request's state; the scheduler owns it, everybody else reads.

    Positions are drawn like this (block size 4, 10 prompt tokens, 3 generated)::

        position       0 . . . | 4 . . . | 8 . 10 11 | 12
        tokens         [ prompt: prompt_tokens ][ output  ]
        KV computed    [ computed_tokens = 12          )      the newest token's KV is not computed yet
        block_table    [ b0     ,  b1     ,  b2       ,  b3 taken when position 12 is scheduled ]

    An engine makes it from ``token_ids``; the simulator from opaque block ids and a count with
    :meth:`of_blocks`, in which case ``token_ids`` stays empty and only the counts move.
    """

    __slots__ = (
        "adapter",
        "admission",
        "arrival",
        "block_contents",
        "block_hashes",
        "block_table",
        "cached_tokens",
        "chain_end",
        "computed_tokens",
        "deferrals",
        "deferred_admission",
        "finish_reason",
        "id_block_size",
        "max_tokens",
        "multimodal",
        "output_tokens",
        "overtaken",
        "parameters",
        "precedence",
        "preemptions",
        "prefilling",
        "priority",
        "prompt_tokens",
        "publish_at",
        "published_blocks",
        "reads_cache",
        "request_id",
        "root",
        "salt",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt: abc.Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str | None = None,
        adapter: str | None = None,
        multimodal: abc.Sequence[MultimodalItem] = (),
        reads_cache: bool = True,
        parameters: object = None,
    ) -> None:
        """A request of ``prompt`` token ids (int32, 0 or more) that may generate ``max_tokens`` tokens.

        ``priority``: lower runs sooner. ``salt`` and ``adapter`` separate cached prefixes that must not
        be shared; so do the images that prompt tokens stand for (``multimodal``, in order), from the first
        that differs on. ``reads_cache=False`` recomputes the whole prompt (prompt log-probabilities need its
        logits) but still publishes it. ``parameters`` is the engine's (sampling, stop): nobody here looks.
        """
        self.request_id = request_id
        self.token_ids: list[int] = list(prompt)
        """Prompt and output token ids, in order; empty when made from block ids."""
        self.prompt_tokens = len(self.token_ids)
        self.output_tokens = 0
        self.max_tokens = max_tokens
        self.priority = priority
        self.salt = salt
        self.adapter = adapter
        self.multimodal = tuple(multimodal)
        self.reads_cache = reads_cache
        self.parameters = parameters

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.arrival = 0
        """Set by the scheduler: number of requests that arrived before."""
        self.precedence = (priority, 0)
        """(priority, arrival): the smaller goes first, and is preempted last."""
        self.prefilling = False
        """Running, and its next row computes known tokens (prompt, or output lost to a preemption)."""
        self.block_table: list[int] = []
        """Block numbers in order of position; block ``i`` holds positions ``i * block_size`` on."""
        self.computed_tokens = 0
        """Positions ``0 .. computed_tokens - 1`` have their KV in the blocks of ``block_table``."""
        self.cached_tokens = 0
        """Prompt tokens whose prefill a hit saved at first admission; a later recompute adds nothing."""
        self.preemptions = 0

        # The prefix cache's notes: identity of each full block, how many are published, and how many tokens
        # must be computed for the next one.
        self.root: bytes = root_frame(salt, adapter)
        self.chain_end = b""
        self.id_block_size: int | None = None
        self.block_hashes: list[BlockHash] = []
        self.block_contents: list[bytes | int] = []
        self.published_blocks = 0
        self.publish_at = 0
        # The scheduler's notes on waiting for somebody else's prefill.
        self.admission = 0
        self.deferred_admission = 0
        self.deferrals = 0
        self.overtaken = 0
        """Times a later arrival of its priority was admitted before it for its longer cached prefix."""

    @classmethod
    def of_blocks(
        cls,
        request_id: str,
        block_ids: abc.Sequence[int],
        prompt_tokens: int,
        max_tokens: int,
        *,
        block_size: int,
        output_block_ids: abc.Sequence[int] = (),
        priority: int = 0,
        salt: str | None = None,
        adapter: str | None = None,
        parameters: object = None,
    ) -> "Sequence":
        """A request whose content is known only as one opaque id per block (trace replay).

        ``block_ids[i]`` names prompt block ``i`` *with everything before it*, as Mooncake's ``hash_ids`` do;
        an image in it is part of what they name. Ids past the last full block
        (``prompt_tokens // block_size``) are ignored. ``output_block_ids``
        name, in order, the block in which the prompt ends and the ones after it once output has filled
        them; without them generated blocks cannot be hit. Raises ValueError when a full prompt block has
        no id.
        """
        full = prompt_tokens // block_size
        if len(block_ids) < full:
            raise ValueError(
                f"request {request_id}: {len(block_ids)} block ids for {full} full blocks of {block_size} "
                f"tokens ({prompt_tokens} prompt tokens); give one id per full block"
            )
        sequence = cls(
            request_id, (), max_tokens, priority=priority, salt=salt, adapter=adapter, parameters=parameters
        )
        sequence.prompt_tokens = prompt_tokens
        sequence.id_block_size = block_size
        sequence.block_hashes = [*block_ids[:full], *output_block_ids]
        sequence.block_contents = sequence.block_hashes  # an id is its own proof
        return sequence

    def prefix(self, request_id: str, tokens: int) -> "Sequence":
        """A request that is the first ``tokens`` tokens of this one, with the same salt and adapter.

        >>> whole = Sequence("a", range(10), max_tokens=4, salt="s")
        >>> part = whole.prefix("b", 4)
        >>> part.token_ids, part.root == whole.root
        ([0, 1, 2, 3], True)
        """
        if self.id_block_size is None:
            return Sequence(
                request_id,
                self.token_ids[:tokens],
                1,
                salt=self.salt,
                adapter=self.adapter,
                multimodal=[item for item in self.multimodal if item.offset < tokens],
            )
        full = tokens // self.id_block_size
        return Sequence.of_blocks(
            request_id,
            [name for name in self.block_hashes[:full] if isinstance(name, int)],
            tokens,
            1,
            block_size=self.id_block_size,
            salt=self.salt,
            adapter=self.adapter,
        )

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return self.prompt_tokens + self.output_tokens

    @property
    def output_ids(self) -> list[int]:
        """Generated token ids so far; empty when made from block ids."""
        return self.token_ids[self.prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, prompt={self.prompt_tokens}, "
            f"output={self.output_tokens}/{self.max_tokens}, computed={self.computed_tokens})"
        )
