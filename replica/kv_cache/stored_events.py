"""From newly hittable blocks of one sequence to the events that announce them."""

from collections.abc import Sequence as Row

from replica.contract.kv_events import BlockHash, BlocksStored, ExtraKeys
from replica.contract.multimodal import multimodal_keys
from replica.sequence import Sequence


def stored_events(
    sequence: Sequence, hashes: Row[BlockHash], first_block: int, news: list[bool], block_size: int
) -> list[BlocksStored]:
    """One event per run of blocks that are new; ``news[i]`` speaks of block ``first_block + i``.

    ``hashes`` are those of the sequence's blocks of ``block_size`` tokens, from the first on.

    >>> sequence = Sequence("a", range(8), max_tokens=1)
    >>> for event in stored_events(sequence, [b"w", b"x", b"y", b"z"], 1, [True, False, True], block_size=2):
    ...     print(event.block_hashes, event.parent_hash, event.token_ids)
    (b'x',) b'w' (2, 3)
    (b'z',) b'y' (6, 7)
    """
    events = []
    first = first_block
    for index, new in enumerate([*news, False], first_block):
        if not new:
            if first < index:
                events.append(_stored(sequence, hashes, first, index, block_size))
            first = index + 1
    return events


def _stored(
    sequence: Sequence, hashes: Row[BlockHash], first: int, stop: int, block_size: int
) -> BlocksStored:
    return BlocksStored(
        block_hashes=tuple(hashes[first:stop]),
        parent_hash=hashes[first - 1] if first else None,
        token_ids=tuple(sequence.token_ids[first * block_size : stop * block_size]),
        block_size=block_size,
        adapter=sequence.adapter,
        extra_keys=_extra_keys(sequence, first, stop, block_size),
    )


def _extra_keys(
    sequence: Sequence, first: int, stop: int, block_size: int
) -> tuple[ExtraKeys | None, ...] | None:
    """As vLLM tells them: adapter with every block, the images in it, the salt with a prompt's first.

    >>> from replica.contract.multimodal import MultimodalItem
    >>> cat = MultimodalItem("cat", 3, 2)
    >>> sequence = Sequence("a", range(8), max_tokens=1, salt="s", adapter="lora", multimodal=[cat])
    >>> _extra_keys(sequence, 0, 2, 2), _extra_keys(sequence, 2, 4, 2)
    ((('lora', 's'), ('lora', ('cat', 1))), (('lora', ('cat', -1)), ('lora',)))
    """
    adapter: ExtraKeys = () if sequence.adapter is None else (sequence.adapter,)
    items = sequence.multimodal
    salted = first == 0 and sequence.salt is not None
    if not adapter and not salted and not items:
        return None
    each = [adapter] * (stop - first)
    if items:
        for place in range(stop - first):
            start = (first + place) * block_size
            each[place] += multimodal_keys(items, start, start + block_size)
    if salted:
        each[0] += (sequence.salt,)
    return tuple(keys or None for keys in each) if any(each) else None
