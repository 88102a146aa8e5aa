"""One block of KV memory: who holds it, what it holds, its place in the free queue."""

from replica.contract.kv_events import BlockHash

Content = bytes | int
"""What a block holds: raw token bytes (engine), or an opaque id (simulator)."""

Identity = bytes | int
"""Names a prefix without a hash: a root's frame (bytes), or a number given when its last block was stored."""


class Block:
    """Bookkeeping of one block; made once with the pool and never dropped.

    ``references`` counts the sequences whose table has it; at 0 it is in the free queue. It can be free
    and still hittable: then ``key`` is set. ``content`` and ``parent`` (identity of
    the prefix before it) are what a hit is verified against; ``identity`` names the prefix
    that ends with this block. Blocks with one key are linked by ``twin``.
    """

    __slots__ = ("content", "identity", "key", "next", "number", "parent", "previous", "references", "twin")

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.key: BlockHash | None = None
        self.content: Content = 0
        self.parent: Identity = 0
        self.identity: Identity = 0
        self.twin: Block | None = None
        self.previous: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        return f"Block({self.number}, references={self.references}, cached={self.key is not None})"
