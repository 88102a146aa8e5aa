"""Block identity: golden vectors, chaining, separation of salts and adapters."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract import block_hash as module
from replica.contract.block_hash import block_hash, chain, hash_number, root_frame, root_hash, token_bytes

# Computed once, on another day and in another process: these must never change, or fleets disagree.
GOLDEN_ROOTS = {
    (None, None): "1d85b69a7011b6ce14814bbcdbdbb1da732687b147c523c5c4362201f0a78232",
    ("salt1", None): "aaa9107179a5581dd59cfa411eb17bfa69b707d3056074ae8dbe4399988efbac",
    (None, "salt1"): "d28b593d9ccd8cd304ae58fd0d4d221529e3edff2e8e40c4802b5f90286d4c32",
    ("a", "b"): "b99e2a1da669bf6fec479f943fa2082b1cff9154a4bd099f4ee0689c1bd3d468",
}
GOLDEN_CHAIN = [  # tokens 0..31, blocks of 16, no salt, no adapter
    "0b9d76b17d10a3049cff9e350c6e0e2be5262642900810381f6da3d6fd6853e5",
    "617e040e7960891a3d844f1b010c0a6592fb34cb28d08bd88790366b1a390716",
]
GOLDEN_SALTED_CHAIN = [
    "42c3b81acdb6801cbe05bd83819cd2e9975ee3100930cd56f5334822caa7b481",
    "1c098546b5093446f5d03a188b0f14deb0bbab3bdbf76a6107bae8c30d8303bc",
]


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(("salt", "adapter"), GOLDEN_ROOTS)
def test_golden_roots(salt, adapter):
    assert root_hash(salt, adapter).hex() == GOLDEN_ROOTS[salt, adapter]


def test_golden_chain():
    assert [h.hex() for h in chain(range(32), 16, root_hash())] == GOLDEN_CHAIN
    assert [h.hex() for h in chain(range(32), 16, root_hash("salt1"))] == GOLDEN_SALTED_CHAIN
    assert hash_number(bytes.fromhex(GOLDEN_CHAIN[1])) == 9768367425395951382


def test_h1_h2_b021_the_same_in_every_process_whatever_seeds_it_is_given():
    code = "from replica.contract.block_hash import *; print(chain(range(32), 16, root_hash())[1].hex())"
    for seed in ("0", "1"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(module.__file__).parents[2]),
        }
        printed = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert printed.stdout.strip() == GOLDEN_CHAIN[1], printed.stderr


def test_h3_only_full_blocks_are_hashed_each_over_its_parent():
    root = root_hash()
    first = block_hash(root, [0, 1, 2])
    assert chain(range(6), 3, root) == [first, block_hash(first, [3, 4, 5])]
    assert chain(range(8), 3, root) == chain(range(6), 3, root)
    assert chain(range(2), 3, root) == []


def test_h5_a_change_in_one_block_changes_every_later_hash():
    one = chain([9, *range(1, 32)], 16, root_hash())
    other = chain(range(32), 16, root_hash())
    assert one[0] != other[0] and one[1] != other[1]


def test_b081_a_block_is_not_found_under_another_parent():
    x, y = list(range(16)), list(range(100, 116))
    assert chain(x + y, 16, root_hash())[1] != chain(y, 16, root_hash())[0]


def test_h9_salt_and_adapter_do_not_share_a_namespace():
    roots = [
        root_hash(),
        root_hash(salt="foo"),
        root_hash(adapter="foo"),
        root_hash(salt="foo", adapter="foo"),
        root_hash(salt=""),
        root_hash(salt="foo adapter 3 foo"),
        root_hash(salt="fo", adapter="o"),
    ]
    assert len(set(roots)) == len(roots)


texts = st.none() | st.text(alphabet="ab 0123456789 salt adapter é", max_size=24)


@given(texts, texts, texts, texts)
def test_the_frame_of_salt_and_adapter_is_injective(salt, adapter, salt2, adapter2):
    assert (root_frame(salt, adapter) == root_frame(salt2, adapter2)) == (
        (salt, adapter) == (salt2, adapter2)
    )


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 8), st.data())
def test_h4_extending_a_chain_equals_computing_it(tokens, block_size, data):
    whole = chain(tokens, block_size, root_hash("s"))
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert chain(tokens, block_size, root_hash("s"), known) == whole


@given(st.lists(st.integers(0, 99), min_size=4, max_size=40), st.data())
def test_two_prompts_share_exactly_the_hashes_of_their_common_blocks(tokens, data):
    cut = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:cut], tokens[cut] + 1, *tokens[cut + 1 :]]
    one, two = chain(tokens, 4, root_hash()), chain(other, 4, root_hash())
    assert [a == b for a, b in zip(one, two, strict=True)] == [i < cut // 4 for i in range(len(one))]


def test_tokens_are_little_endian_words():
    assert token_bytes([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


def test_a_token_id_outside_int32_is_an_error():
    with pytest.raises(OverflowError):
        block_hash(root_hash(), [2**31])
