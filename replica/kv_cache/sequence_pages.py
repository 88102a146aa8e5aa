"""A sequence as a radix tree compares it (page by page) and as events name it (block hash by block hash)."""

from collections.abc import Callable
from collections.abc import Sequence as Row

from replica.contract.block_hash import TOKEN_BYTES, root_hash, token_bytes
from replica.contract.kv_events import BlockHash
from replica.kv_cache.radix_node import Unit
from replica.sequence import Sequence

RawBlockHash = Callable[[bytes, bytes], bytes]
"""(parent digest, raw token bytes) -> digest."""


def page_units(sequence: Sequence, page_tokens: int, pages: int) -> Row[Unit]:
    """One unit per page, at least for the first ``pages`` that have a name; kept with the sequence.

    >>> page_units(Sequence("a", [7, 8, 9], max_tokens=1), 1, 3)
    [7, 8, 9]
    >>> page_units(Sequence("a", [7, 8, 9], max_tokens=1), 2, 1)
    [b'\\x07\\x00\\x00\\x00\\x08\\x00\\x00\\x00']
    """
    if sequence.id_block_size is not None:
        return sequence.block_contents
    if page_tokens == 1:
        return sequence.token_ids
    contents = sequence.block_contents
    if len(contents) < pages:
        width = page_tokens * TOKEN_BYTES
        raw = token_bytes(sequence.token_ids[len(contents) * page_tokens : pages * page_tokens])
        contents += [raw[at : at + width] for at in range(0, len(raw), width)]
    return contents


def event_hashes(
    sequence: Sequence, hash_tokens: int, hash_pages: int, count: int, raw_hash: RawBlockHash
) -> Row[BlockHash]:
    """At least the first ``count`` block hashes, each of ``hash_tokens`` tokens; kept with the sequence.

    Of opaque ids, each naming a page with everything before it, the last of ``hash_pages`` names the block.
    """
    hashes = sequence.block_hashes
    if sequence.id_block_size is not None:
        return hashes[hash_pages - 1 :: hash_pages]
    if len(hashes) < count:
        raw = token_bytes(sequence.token_ids[len(hashes) * hash_tokens : count * hash_tokens])
        width = hash_tokens * TOKEN_BYTES
        parent = sequence.chain_end or root_hash(sequence.salt, sequence.adapter)
        for at in range(0, len(raw), width):
            parent = raw_hash(parent, raw[at : at + width])
            hashes.append(parent)
        sequence.chain_end = parent
    return hashes
