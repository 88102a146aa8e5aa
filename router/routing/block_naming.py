"""How one engine names the blocks of a prompt: its block size and its chain of hashes.

In exact mode a prompt has one chain of keys for each naming in the fleet, and a replica is asked for its own.
A naming that reproduces the engine's own hashes lets KV events be used as they come. Engines whose hashes
cannot be reproduced get ``tokens``: the router's own chain, to which events are translated by the token ids
they carry (``engine_names``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from replica.contract import block_hash as contract
from replica.contract.multimodal import MultimodalItem, MultimodalKey, multimodal_frame
from router.routing import vllm_block_hash

HashScheme = Literal["sha256", "sha256_cbor", "warmroute", "tokens"]

DEFAULT_BLOCK_TOKENS = 16
MAX_CHAIN_BLOCKS = 8_192
"""Longer prompts are known by so many blocks: index and decision stay bounded."""


@dataclass(frozen=True, slots=True)
class BlockNaming:
    """One engine's names for blocks. Equal namings share one chain of keys.

    >>> BlockNaming("sha256", 16).keys(range(40))               # vLLM's own; 8 tokens are no full block
    [3262291359910021016, 7142137847444424233]
    >>> BlockNaming("tokens", 16).keys(range(16)) == BlockNaming("tokens", 16).keys(range(16), salt="a")
    False
    """

    scheme: HashScheme = "tokens"
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    seed: str | None = None
    """vLLM's PYTHONHASHSEED, for the two sha256 schemes."""

    def keys(
        self, tokens: Sequence[int], salt: str | None = None, items: Sequence[MultimodalItem] = ()
    ) -> list[int]:
        """64-bit chained keys of the full blocks of ``tokens``, at most ``MAX_CHAIN_BLOCKS``.

        ``items``: images that tokens stand for; they change the keys from the first block they reach into on.
        Raises ``OverflowError`` for a token id outside int32, ``UnicodeEncodeError`` for a salt that is no
        text. Cost: 1.5 µs per 16-token block (``vllm_block_hash`` 3 to 8) on a busy two-core machine.
        """
        size = self.block_tokens
        if len(tokens) > MAX_CHAIN_BLOCKS * size:
            tokens = tokens[: MAX_CHAIN_BLOCKS * size]
        if self.scheme == "tokens":
            return _token_chain(tokens, size, token_root(salt), items)
        if self.scheme == "warmroute":
            digests = contract.chain(tokens, size, contract.root_hash(salt), items=items)
            return [contract.hash_number(digest) for digest in digests]
        return vllm_block_hash.chain(tokens, size, self.scheme, seed=self.seed, salt=salt, items=items)

    def described(self) -> str:
        """For logs and ``/fleet``: ``"sha256/16"``."""
        return f"{self.scheme}/{self.block_tokens}"


def token_root(salt: str | None = None, adapter: str | None = None) -> int:
    """The parent of a first block in the ``tokens`` scheme."""
    return _number(blake2b(contract.root_frame(salt, adapter), digest_size=8).digest())


def token_key(parent: int, tokens: Iterable[int], images: Iterable[MultimodalKey] = ()) -> int:
    """The ``tokens`` key of the block of ``tokens`` after ``parent``; all 64 bits carry the chain.

    ``images``: those that reach into the block.
    """
    return _key(parent, contract.token_bytes(tokens) + multimodal_frame(images))


def _token_chain(tokens: Sequence[int], size: int, root: int, items: Sequence[MultimodalItem]) -> list[int]:
    keys: list[int] = []
    parent = root
    for content in contract.block_contents(tokens, size, 0, len(tokens) // size, items):
        parent = _key(parent, content)
        keys.append(parent)
    return keys


def _key(parent: int, content: bytes) -> int:
    return _number(blake2b(parent.to_bytes(8, "little") + content, digest_size=8).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")
