"""Images in the names that a router gives blocks: vLLM's formula, our replica's, and what events tell."""

import pickle
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from replica.contract.block_hash import block_contents, chain, hash_number, root_hash
from replica.contract.kv_events import BlocksStored, EventBatch
from replica.contract.kv_events_wire import Form, decode, encode
from replica.contract.multimodal import MultimodalItem, multimodal_keys
from replica.kv_cache.prefix_cache import PrefixCache
from replica.sequence import Sequence
from router.routing import vllm_block_hash
from router.routing.block_naming import BlockNaming, HashScheme, token_key, token_root
from router.routing.block_source import BlockSettings, BlockSource
from router.routing.engine_names import EngineNames
from tests.contract.vllm_readers import ArrayBatch, MapBatch

SCHEMES: tuple[HashScheme, ...] = ("sha256", "sha256_cbor", "warmroute", "tokens")
IMAGES = [MultimodalItem("a", 11, 10), MultimodalItem("b", 30, 18), MultimodalItem("c", 48, 7)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_h5_m9_same_tokens_under_another_image_have_other_names_from_its_block_on(scheme: HashScheme) -> None:
    naming, tokens = BlockNaming(scheme, 8), [7] * 48
    plain = naming.keys(tokens)
    cat, dog = (naming.keys(tokens, items=[MultimodalItem(name, 20, 10)]) for name in ("cat", "dog"))
    for one, other in ((plain, cat), (cat, dog)):
        assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 2 + [False] * 4
    assert cat == naming.keys(tokens, items=[MultimodalItem("cat", 20, 10)])


def test_h7_m9_vllm_s_tuples() -> None:
    """Each block's, written out; the salt comes after the images."""
    tokens = tuple(range(64))
    parent = sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
    names = []
    for block, extra in enumerate(
        [
            (("mm", "a", 11), ("cache_salt", "s")),
            (("mm", "a", -5), ("mm", "b", 14)),
            (("mm", "b", -2),),
            (("mm", "c", 0),),
        ]
    ):
        held = (parent, tokens[16 * block : 16 * block + 16], extra)
        parent = sha256(pickle.dumps(held, protocol=5)).digest()
        names.append(hash_number(parent))
    assert vllm_block_hash.chain(tokens, 16, "sha256", salt="s", items=IMAGES) == names


def test_offsets_are_encoded_as_cbor_wants() -> None:
    # RFC 8949, appendix A: 10 is 0a, -10 is 29, -100 is 3863, "a" is 6161.
    for offset, encoded in ((10, "0a"), (-10, "29"), (-100, "3863")):
        written = vllm_block_hash._cbor(b"", (), (("mm", "a", offset),))
        assert written.hex() == "834080" + "81" + "83" + "626d6d" + "6161" + encoded


def test_our_replica_s_names_are_the_contract_s() -> None:
    digests = chain(range(64), 16, root_hash("s"), items=IMAGES)
    assert BlockNaming("warmroute", 16).keys(range(64), "s", IMAGES) == [hash_number(d) for d in digests]


def test_token_names_can_be_made_block_by_block() -> None:
    parent, keys = token_root("s"), []
    for start in range(0, 64, 16):
        parent = token_key(parent, range(start, start + 16), multimodal_keys(IMAGES, start, start + 16))
        keys.append(parent)
    assert BlockNaming("tokens", 16).keys(range(64), "s", IMAGES) == keys
    assert len(block_contents(range(64), 16, 0, 4, IMAGES)) == 4


def told(image: str, form: Form = "map") -> BlocksStored:
    """What our replica tells of a prompt with an image, through the wire."""
    cache = PrefixCache(8, 16, record_events=True)
    shown = [MultimodalItem(image, 20, 8)]
    sequence = Sequence("a", [7] * 48, 1, salt="s", multimodal=shown)
    assert cache.adopt(sequence, cache.match(sequence))
    sequence.computed_tokens = 48
    cache.publish(sequence)
    (event,) = decode(encode(EventBatch(0.0, tuple(cache.take_events())), form=form)).events
    assert isinstance(event, BlocksStored)
    return event


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_events_tell_of_an_image_names_its_blocks(form: Form) -> None:
    event = told("cat", form)
    assert event.extra_keys == (("s",), (("cat", 4),), None) and event.salt == "s"
    names = EngineNames()
    for image in ("cat", "dog"):
        keys, _ = names.stored(told(image, form))
        items = [MultimodalItem(image, 20, 8)]
        assert keys == BlockNaming("tokens", 16).keys([7] * 48, "s", items)
        assert list(told(image, form).block_hashes) == BlockNaming("warmroute", 16).keys([7] * 48, "s", items)
    assert names.unnamed == 0 and len(names) == 5, "the first block is the same under both"


@pytest.mark.parametrize(("form", "reader"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_vllm_consumer_reads_which_images_reach_into_a_block(form: Form, reader: Any) -> None:
    payload = encode(EventBatch(0.0, (told("cat"),)), form=form)
    (event,) = msgspec.msgpack.decode(payload, type=reader).events
    assert event.extra_keys == [("s",), (["cat", 4],), None]


def _first_block(extra: tuple[object, ...], items: list[MultimodalItem]) -> BlocksStored:
    (name,) = BlockNaming("sha256", 16).keys(range(16), items=items)
    return BlocksStored((name,), None, tuple(range(16)), 16, extra_keys=(extra,))


def test_a_vllm_is_believed_by_a_prompt_that_begins_with_an_image() -> None:
    notices: list[str] = []
    source = BlockSource(BlockSettings("sha256", 16))
    right = _first_block((("cat", 2),), [MultimodalItem("cat", 2, 5)])
    assert source.check(right, notices.append) is False and source._verified
    other = BlockSource(BlockSettings("sha256", 16))
    unknown = _first_block((("cat", 2), b"digest of embeddings"), [])
    assert other.check(unknown, notices.append) is False and not other._verified and not notices
    wrong = _first_block((("cat", 2),), [MultimodalItem("dog", 2, 5)])
    assert other.check(wrong, notices.append) is True and other.naming.scheme == "tokens"
    assert len(notices) == 1
