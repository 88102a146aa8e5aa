"""Names of blocks: reference vectors, a real vLLM's hashes, isolation of salts, bounds."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract import block_hash as contract
from replica.contract.kv_events import BlocksStored
from router.routing import vllm_block_hash
from router.routing.block_naming import MAX_CHAIN_BLOCKS, BlockNaming, HashScheme, token_key, token_root
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests

SCHEMES: tuple[HashScheme, ...] = ("sha256", "sha256_cbor", "warmroute", "tokens")


# The vectors of research/engines.md 1.2: tokens 0..31, blocks of 16.
@pytest.mark.parametrize(
    ("scheme", "seed", "first", "second", "salted"),
    [
        ("sha256_cbor", None, 2233398808101521225, 17911472383915781900, 16809245385377282800),
        ("sha256_cbor", "0", 12687895063098490012, 1814341696565857452, 13031471409249404224),
        ("sha256", None, 3262291359910021016, 7142137847444424233, 6546333345941097591),
        ("sha256", "0", 7982712666671721126, 12675106281628537544, 12555789590033178759),
    ],
)
def test_vllm_reference_vectors(
    scheme: HashScheme, seed: str | None, first: int, second: int, salted: int
) -> None:
    naming = BlockNaming(scheme, 16, seed)
    assert naming.keys(range(40)) == [first, second]
    assert naming.keys(range(16), salt="salt1") == [salted]


@pytest.mark.parametrize(
    ("algorithm", "seed", "begins", "ends"),
    [
        ("sha256_cbor", None, "9bd96a48", "9581eef0"),
        ("sha256_cbor", "0", "4e1195df", "f2e61c3e"),
        ("sha256", None, "066b1e89", "0d71198"),
        ("sha256", "0", "1973e238", "4b14aa7c"),
    ],
)
def test_h1_vllm_s_digest_before_the_first_block_is_of_its_seed(
    algorithm: vllm_block_hash.VllmAlgorithm, seed: str | None, begins: str, ends: str
) -> None:
    digest = vllm_block_hash._digest_before_first(algorithm, seed).hex()
    assert len(digest) == 64 and digest.startswith(begins) and digest.endswith(ends)


def test_recorded_prompts_have_the_hashes_that_vllm_announced() -> None:
    naming = BlockNaming("sha256", BLOCK_TOKENS)
    announced = {
        event.block_hashes
        for batch in wire_batches()
        for event in batch.decoded.events
        if isinstance(event, BlocksStored)
    }
    requests = wire_requests()
    assert len(requests) == 21
    for request in requests:
        assert tuple(naming.keys(request.prompt_token_ids, request.cache_salt)) in announced


def test_large_token_ids_are_encoded_as_cbor_wants() -> None:
    # One array of integers of every width, against the bytes RFC 8949 gives for them (appendix A).
    encoded = vllm_block_hash._cbor(b"", (0, 23, 24, 255, 256, 65_535, 65_536, 1_000_000), None)
    assert (
        encoded.hex()
        == "8340" + "88" + "00171818" + "18ff" + "190100" + "19ffff" + "1a00010000" + "1a000f4240" + "f6"
    )


def test_our_replicas_names_are_the_contracts() -> None:
    digests = contract.chain(range(64), 16, contract.root_hash("s"))
    assert BlockNaming("warmroute", 16).keys(range(70), "s") == [contract.hash_number(d) for d in digests]


@pytest.mark.parametrize("scheme", SCHEMES)
@given(data=st.data())
def test_names_are_chained_and_parted_by_salt(scheme: HashScheme, data: st.DataObject) -> None:
    naming = BlockNaming(scheme, 4)
    tokens = data.draw(st.lists(st.integers(0, 200_000), min_size=4, max_size=40))
    more = data.draw(st.lists(st.integers(0, 200_000), max_size=9))
    keys = naming.keys(tokens)
    assert len(keys) == len(tokens) // 4
    assert naming.keys(tokens + more)[: len(keys)] == keys, "a longer prompt has the shorter one's names"
    other = [tokens[0] + 1, *tokens[1:]]
    assert not set(naming.keys(other)) & set(keys), "a changed head changes every name"
    assert not set(naming.keys(tokens, "a")) & set(keys)
    assert not set(naming.keys(tokens, "a")) & set(naming.keys(tokens, "b"))


def test_token_names_can_be_made_block_by_block() -> None:
    parent, keys = token_root("s"), []
    for start in (0, 3, 6):
        parent = token_key(parent, range(start, start + 3))
        keys.append(parent)
    assert BlockNaming("tokens", 3).keys(range(10), "s") == keys
    assert token_root("a") != token_root(None, "a")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_very_long_prompts_are_known_by_their_head(scheme: HashScheme) -> None:
    naming = BlockNaming(scheme, 1)
    assert len(naming.keys(range(MAX_CHAIN_BLOCKS + 5))) == MAX_CHAIN_BLOCKS


@pytest.mark.parametrize("scheme", ["warmroute", "tokens"])
def test_ids_that_no_vocabulary_has_are_refused(scheme: HashScheme) -> None:
    with pytest.raises(OverflowError):
        BlockNaming(scheme, 1).keys([1 << 40])


def test_names_do_not_depend_on_the_process() -> None:
    code = (
        "from router.routing.block_naming import BlockNaming;"
        "print([BlockNaming(s, 4).keys(range(8), 'x') "
        "for s in 'sha256 sha256_cbor warmroute tokens'.split()])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert runs == {str([BlockNaming(s, 4).keys(range(8), "x") for s in SCHEMES]) + "\n"}
