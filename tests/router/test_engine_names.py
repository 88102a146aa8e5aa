"""Translating engine hashes through tokens: what is named is named right, what cannot be is left out."""

from hypothesis import given
from hypothesis import strategies as st

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from router.routing.block_naming import BlockNaming
from router.routing.engine_names import EngineNames
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests

SIZE = 2


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=SIZE, max_size=10), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_any_engine_s_blocks_get_the_names_of_their_prompt(prompts: list[list[int]], order: object) -> None:
    """The engine's hashes are arbitrary but chained; every stored block ends up under its prompt's key."""
    naming = BlockNaming("tokens", SIZE)
    names, engine = EngineNames(), {}
    for tokens in prompts:
        prefixes = [tuple(tokens[: end * SIZE]) for end in range(1, len(tokens) // SIZE + 1)]
        start = next((i for i, prefix in enumerate(prefixes) if prefix not in engine), len(prefixes))
        if start == len(prefixes):
            continue
        for prefix in prefixes[start:]:
            engine[prefix] = -1 - len(engine)  # negative, as SGLang's are
        parent = engine[prefixes[start - 1]] if start else None
        run = tuple(engine[prefix] for prefix in prefixes[start:])
        keys, parent_key = names.stored(
            BlocksStored(run, parent, tuple(tokens[start * SIZE : len(prefixes) * SIZE]), SIZE)
        )
        assert keys == naming.keys(tokens)[start:]
        assert parent_key == (naming.keys(tokens)[start - 1] if start else None)
    for prefix, value in engine.items():
        assert names.removed(BlocksRemoved((value,))) == naming.keys(prefix)[-1:]
    assert len(names) == 0 and names.unnamed == 0


def test_a_recorded_vllm_is_named_without_knowing_its_hash() -> None:
    names, naming = EngineNames(), BlockNaming("tokens", BLOCK_TOKENS)
    keys = [
        tuple(names.stored(event)[0])
        for batch in wire_batches()
        for event in batch.decoded.events
        if isinstance(event, BlocksStored)
    ]
    for request in wire_requests():
        assert tuple(naming.keys(request.prompt_token_ids, request.cache_salt)) in keys
    assert names.unnamed == 0


def test_adapters_and_salts_do_not_meet() -> None:
    tokens = (1, 2)
    runs = [
        BlocksStored((1,), None, tokens, SIZE),
        BlocksStored((2,), None, tokens, SIZE, adapter="a"),
        BlocksStored((3,), None, tokens, SIZE, extra_keys=(("a",),)),
        BlocksStored((4,), None, tokens, SIZE, adapter="a", extra_keys=(("a", "a"),)),
    ]
    names = EngineNames()
    assert len({names.stored(run)[0][0] for run in runs}) == len(runs)


def test_copies_keep_their_name_until_the_last_is_gone() -> None:
    names, run = EngineNames(), BlocksStored((1,), None, (1, 2), SIZE)
    for _ in range(3):
        names.stored(run)
    gone = BlocksRemoved((1,))
    assert [len(names.removed(gone)) for _ in range(4)] == [1, 1, 1, 0]
    assert len(names) == 0 and names.unnamed == 1


def test_what_cannot_be_named_is_left_out() -> None:
    names = EngineNames()
    for run in (
        BlocksStored((5,), 4, (1, 2), SIZE),  # unknown parent
        BlocksStored((5,), None, (), SIZE),  # no tokens
        BlocksStored((5,), None, (1, 2, 3), SIZE),
        BlocksStored((5,), None, (1, 1 << 40), SIZE),
        BlocksStored((5,), None, ((1, 2), (3, 4)), SIZE),  # type: ignore[arg-type]  # pairs, as with EAGLE
        BlocksStored((5,), None, (), 0),
    ):
        assert names.stored(run) == ([], None)
    assert names.unnamed == 6 and len(names) == 0 and names.removed(BlocksRemoved((5,))) == []
