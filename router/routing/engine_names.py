"""One replica's block hashes translated to the router's own keys, through the tokens its events carry.

For engines whose hashes the router cannot reproduce: SGLang, vLLM with an xxhash, an unknown seed or LoRA
adapters. A stored run names its parent and brings its tokens, so its blocks can be named anew, block by
block (``block_naming``, scheme ``tokens``); a removal is looked up. A run whose parent is unknown, or whose
tokens do not fit its blocks, cannot be named and is left out: no credit rather than a wrong one.

Cost: about 1.5 µs and 200 bytes per block, on top of the block index.
"""

from replica.contract.kv_events import BlockHash, BlocksRemoved, BlocksStored
from router.routing.block_index import block_name
from router.routing.block_naming import token_key, token_root


class EngineNames:
    """Engine hash -> own key, for every block a replica holds in any tier, copies counted.

    >>> names = EngineNames()
    >>> keys, parent = names.stored(BlocksStored((101, 102), None, (1, 2, 3, 4), block_size=2))
    >>> keys == [token_key(token_root(), [1, 2]), token_key(keys[0], [3, 4])], parent
    (True, None)
    >>> more = BlocksStored((103,), parent_hash=102, token_ids=(5, 6), block_size=2)
    >>> names.stored(more) == ([token_key(keys[1], [5, 6])], keys[1])
    True
    >>> names.removed(BlocksRemoved((101, 999))) == keys[:1], names.unnamed
    (True, 1)
    """

    __slots__ = ("_keys", "_more_copies", "unnamed")

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}
        self._more_copies: dict[int, int] = {}
        self.unnamed = 0
        """Events, or hashes of removals, that could not be translated."""

    def __len__(self) -> int:
        return len(self._keys)

    def stored(self, event: BlocksStored) -> tuple[list[int], int | None]:
        """Own keys of the run's blocks and of its parent; no keys when it cannot be named."""
        parent = None
        if event.parent_hash is None:
            key = token_root(event.salt, event.adapter)
        else:
            known = self._keys.get(block_name(event.parent_hash))
            if known is None:
                self.unnamed += 1
                return [], None
            key = parent = known
        size, tokens = event.block_size, event.token_ids
        if size < 1 or len(tokens) != size * len(event.block_hashes):
            self.unnamed += 1
            return [], parent
        keys = []
        try:
            for block in range(len(event.block_hashes)):
                start = block * size
                key = token_key(key, tokens[start : start + size], event.multimodal(block))
                keys.append(key)
        except (TypeError, ValueError, OverflowError):  # not token ids: pairs, or beyond int32
            self.unnamed += 1
            return [], parent
        for value, key in zip(event.block_hashes, keys, strict=True):
            name = block_name(value)
            if name in self._keys:
                self._more_copies[name] = self._more_copies.get(name, 0) + 1
            else:
                self._keys[name] = key
        return keys, parent

    def removed(self, event: BlocksRemoved) -> list[int]:
        """Own keys of the removed blocks; hashes never named are left out."""
        keys = []
        for value in event.block_hashes:
            name = block_name(value)
            key = self._keys.get(name)
            if key is None:
                self.unnamed += 1
                continue
            keys.append(key)
            more = self._more_copies.get(name)
            if more is None:
                del self._keys[name]
            elif more == 1:
                del self._more_copies[name]
            else:
                self._more_copies[name] = more - 1
        return keys

    def key(self, value: BlockHash) -> int | None:
        """The own key of the block with that hash, if it was named."""
        return self._keys.get(block_name(value))

    def cleared(self) -> None:
        """The replica holds nothing any more."""
        self._keys.clear()
        self._more_copies.clear()
