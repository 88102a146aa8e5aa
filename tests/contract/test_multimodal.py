"""Images in block identity: same tokens and another image are another block, from the image on."""

import doctest
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract import kv_events
from replica.contract import multimodal as module
from replica.contract.block_hash import block_contents, chain, hash_number, root_hash, token_bytes
from replica.contract.multimodal import MultimodalItem, check_items, multimodal_frame, multimodal_keys

ROOT = root_hash()
GOLDEN = 8436420152269439876
"""Of "cat" at 4 to 12 of the tokens 0 to 15. Computed once: fleets must agree."""


def item(name, offset, tokens):
    return MultimodalItem(name, offset, tokens)


@pytest.mark.parametrize("documented", [module, kv_events])
def test_doctests(documented):
    assert doctest.testmod(documented).failed == 0


@pytest.mark.parametrize(
    ("start", "stop", "keys"),
    [(0, 5, (("id1", 0),)), (3, 8, (("id1", -3),)), (6, 10, ()), (0, 15, (("id1", 0), ("id2", 10)))],
)
def test_h6_items_that_reach_into_a_range_and_where_they_begin(start, stop, keys):
    assert multimodal_keys([item("id1", 0, 5), item("id2", 10, 5)], start, stop) == keys


def test_h5_another_image_in_the_first_block_changes_every_hash():
    one, other, none = (
        chain(range(32), 16, ROOT, items=items) for items in ([item("a", 3, 2)], [item("b", 3, 2)], [])
    )
    assert not {*one} & {*other} and not {*one, *other} & {*none}


def test_before_the_image_nothing_changes_and_from_its_block_on_everything():
    plain = chain([7] * 48, 8, ROOT)
    cat, dog, later = (
        chain([7] * 48, 8, ROOT, items=[item(name, at, 10)])
        for name, at in (("cat", 20), ("dog", 20), ("cat", 21))
    )
    for one, other in ((plain, cat), (cat, dog), (cat, later)):
        assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 2 + [False] * 4


def test_the_identity_of_an_image_s_block_never_changes():
    (digest,) = chain(range(16), 16, ROOT, items=[item("cat", 4, 8)])
    assert hash_number(digest) == GOLDEN
    framed = ROOT + token_bytes(range(16)) + b"\xff\xff\xff\xff multimodal 3 cat 4"
    assert digest == blake2b(framed, digest_size=32).digest()
    assert chain(range(16), 16, ROOT) == chain(range(16), 16, ROOT, items=[item("cat", 16, 8)])


def test_a_frame_is_no_tokens_of_a_longer_block():
    frame = multimodal_frame([("cat", 0)])
    assert frame[:4] == token_bytes([-1]) and multimodal_frame([]) == b""


names = st.text(alphabet="ab -0123456789 multimodal é", min_size=0, max_size=12)
keys = st.lists(st.tuples(names, st.integers(-40, 40)), max_size=3).map(tuple)


@given(keys, keys)
def test_frames_are_injective(one, other):
    assert (multimodal_frame(one) == multimodal_frame(other)) == (one == other)


@st.composite
def prompts(draw):
    """Tokens, block size, and items in order, many of them at the edges of blocks."""
    size = draw(st.integers(1, 6))
    tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    items, free = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=4)):
        start = free + gap
        free = start + length
        if free <= len(tokens):
            items.append(item(draw(st.sampled_from("xy")), start, length))
    return tokens, size, items


@given(prompts(), st.data())
def test_h4_extending_a_chain_with_images_equals_computing_it(prompt, data):
    tokens, size, items = prompt
    check_items(items, len(tokens))
    whole = chain(tokens, size, ROOT, items=items)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert chain(tokens, size, ROOT, known, items) == whole
    assert (
        block_contents(tokens, size, len(known), len(whole), items)
        == (block_contents(tokens, size, 0, len(whole), items)[len(known) :])
    )


@given(prompts(), st.data())
def test_two_prompts_share_exactly_the_blocks_before_the_first_image_that_differs(prompt, data):
    tokens, size, items = prompt
    if not items:
        return
    changed = data.draw(st.integers(0, len(items) - 1))
    other = list(items)
    other[changed] = item("another", items[changed].offset, items[changed].tokens)
    one, two = chain(tokens, size, ROOT, items=items), chain(tokens, size, ROOT, items=other)
    same = items[changed].offset // size
    assert [a == b for a, b in zip(one, two, strict=True)] == [i < same for i in range(len(one))]


@pytest.mark.parametrize(
    "items",
    [
        [item("a", -1, 2)],
        [item("a", 0, 0)],
        [item("a", 6, 3)],
        [item("a", 2, 3), item("b", 4, 1)],
        [item("a", 4, 1), item("b", 2, 1)],
        [item("\ud800", 0, 1)],
    ],
)
def test_items_that_cannot_be_are_refused(items):
    with pytest.raises(ValueError):
        check_items(items, 8)
    check_items([item("a", 0, 4), item("b", 4, 4)], 8)
