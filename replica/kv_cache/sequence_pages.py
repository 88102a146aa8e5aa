"""A sequence as a radix tree compares it (page by page) and as events name it (block hash by block hash)."""

from collections.abc import Callable
from collections.abc import Sequence as Row

from replica.contract.block_hash import block_contents, root_hash
from replica.contract.kv_events import BlockHash
from replica.contract.multimodal import multimodal_keys
from replica.kv_cache.radix_node import Unit
from replica.sequence import Sequence

RawBlockHash = Callable[[bytes, bytes], bytes]
"""(parent digest, content) -> digest."""


def page_units(sequence: Sequence, page_tokens: int, pages: int) -> Row[Unit]:
    """One unit per page, at least for the first ``pages`` that have a name; kept with the sequence.

    >>> page_units(Sequence("a", [7, 8, 9], max_tokens=1), 1, 3)
    [7, 8, 9]
    >>> page_units(Sequence("a", [7, 8, 9], max_tokens=1), 2, 1)
    [b'\\x07\\x00\\x00\\x00\\x08\\x00\\x00\\x00']

    Tokens that stand for an image are no units of their own:

    >>> from replica.contract.multimodal import MultimodalItem
    >>> cat = MultimodalItem("cat", 1, 1)
    >>> page_units(Sequence("a", [7, 8, 9], max_tokens=1, multimodal=[cat]), 1, 3)
    [7, b'\\x08\\x00\\x00\\x00\\xff\\xff\\xff\\xff multimodal 3 cat 0', 9]
    """
    if sequence.id_block_size is not None:
        return sequence.block_contents
    tokens, items = sequence.token_ids, sequence.multimodal
    if page_tokens == 1 and not items:
        return tokens
    contents = sequence.block_contents
    known = len(contents)
    if known < pages:
        contents += block_contents(tokens, page_tokens, known, pages, items)
        if page_tokens == 1:
            # As in prompts without images, so that these share what comes before the first.
            for at in range(known, len(contents)):
                if not multimodal_keys(items, at, at + 1):
                    contents[at] = tokens[at]
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
        contents = block_contents(sequence.token_ids, hash_tokens, len(hashes), count, sequence.multimodal)
        parent = sequence.chain_end or root_hash(sequence.salt, sequence.adapter)
        for content in contents:
            parent = raw_hash(parent, content)
            hashes.append(parent)
        sequence.chain_end = parent
    return hashes
