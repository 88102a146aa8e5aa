"""Makes the question that a fetch puts to a peer: which blocks, of which prompt, and what proves them."""

from replica.contract.block_hash import token_bytes
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.tier_transport import Fetch
from replica.peers.peer_call import PeerCall
from replica.peers.peer_wire import Question, ranges_of
from replica.sequence import Sequence


class PeerReader:
    """Asks peers for one engine."""

    def __init__(self, fingerprint: str, key: bytes, block_bytes: int) -> None:
        """``key``: of all that is signed (``peer_wire``)."""
        self._fingerprint = fingerprint
        self._key = key
        self._block_bytes = block_bytes

    def call(self, peer: str, fetch: Fetch, prompt: Sequence) -> PeerCall:
        """The question for what ``fetch`` wants; ``prompt``: up to the last block of the fetch."""
        hashes: dict[int, bytes] = {}
        for place, (tier, name) in enumerate(zip(fetch.plan.sources, fetch.block_hashes, strict=True)):
            if tier is Tier.PEER:
                assert isinstance(name, bytes)
                hashes[fetch.plan.start_block + place] = name
        question = Question(
            self._fingerprint,
            prompt.salt,
            prompt.adapter,
            self._block_bytes,
            ranges_of(sorted(hashes)),
            token_bytes(prompt.token_ids),
            prompt.multimodal,
        )
        return PeerCall(peer, question, hashes, self._key)
