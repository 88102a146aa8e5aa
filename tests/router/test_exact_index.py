"""The exact index: two beliefs, checked names, trust; against our replica's own cache and a real vLLM."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from replica.kv_cache.prefix_cache import PrefixCache
from replica.limits import SchedulerLimits
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from router.routing.block_index import block_name
from router.routing.block_naming import BlockNaming
from router.routing.block_source import SILENT_AFTER, BlockSettings
from router.routing.exact_index import EXPECTED_BLOCKS, Chains, ExactIndex
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests

SIZE = 4
ROOMY = 100_000


def chains_of(index: ExactIndex, tokens: list[int] | range, salt: str | None = None) -> Chains:
    return {naming: naming.keys(tokens, salt) for naming in index.namings}


def held_tokens(index: ExactIndex, tokens: list[int] | range, replicas: int = 1) -> list[int]:
    out = [0] * replicas
    for mask, matched in index.levels(chains_of(index, tokens), len(tokens)):
        for replica in range(replicas):
            if mask >> replica & 1:
                assert not out[replica], "a replica stands in one level"
                out[replica] = matched
    return out


def serve(index: ExactIndex, replica: int, tokens: list[int] | range, matched: int = 0) -> None:
    """A request from choice to last byte, of which no event tells."""
    expectation = index.sent(replica, chains_of(index, tokens), matched)
    assert expectation is not None
    index.over(expectation, computed=True)


def tell(index: ExactIndex, replica: int, events: list[CacheEvent]) -> None:
    for event in events:
        match event:
            case BlocksStored():
                index.stored(replica, event)
            case BlocksRemoved():
                index.removed(replica, event)
            case CacheCleared():
                index.cleared(replica)


class OurReplica:
    """Our replica's real cache and scheduler, one request at a time; answers how many tokens were cached."""

    def __init__(self, blocks: int, raw_hash: object = raw_block_hash) -> None:
        self.cache = PrefixCache(blocks, SIZE, record_events=True, raw_hash=raw_hash)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, SchedulerLimits(max_running=4, max_batched_tokens=64))
        self.served = 0

    def serve(self, tokens: list[int], max_tokens: int, salt: str | None) -> int:
        self.served += 1
        sequence = Sequence(f"q{self.served}", tokens, max_tokens, salt=salt)
        self.scheduler.add(sequence)
        before = self.cache.counters.hit_tokens
        while self.scheduler.has_work:
            batch = self.scheduler.schedule()
            self.scheduler.commit(batch, {r.sequence.request_id: 1 for r in batch.rows if r.samples})
        return self.cache.counters.hit_tokens - before

    def held(self) -> set[bytes]:
        return {block.key for block in self.cache.pool.blocks if block.key is not None}


def other_raw_hash(parent: bytes, raw: bytes) -> bytes:
    return raw_block_hash(b"another seed" + parent, raw)


@pytest.mark.parametrize(
    ("scheme", "raw_hash"),
    [("warmroute", raw_block_hash), ("warmroute", other_raw_hash), (None, raw_block_hash)],
    ids=["own names", "configured wrongly", "translated through tokens"],
)
def test_the_index_equals_our_replicas_blocks_after_500_requests_with_evictions(
    scheme: str | None, raw_hash: object
) -> None:
    """Before every request the match is what the replica then reports; after it both hold the same blocks."""
    rng = random.Random(7)
    replica = OurReplica(60, raw_hash)
    index = ExactIndex([BlockSettings(scheme, SIZE)], ROOMY)  # type: ignore[arg-type]
    heads = [[rng.randrange(100) for _ in range(rng.randrange(30))] for _ in range(5)]
    removals = hits = 0
    for number in range(500):
        tokens = rng.choice(heads)[: rng.randrange(40)] + [
            rng.randrange(3) for _ in range(rng.randint(1, 30))
        ]
        salt = rng.choice([None, None, "tenant"])
        (level,) = index.levels(chains_of(index, tokens, salt), len(tokens)) or [(1, 0)]
        expectation = index.sent(0, chains_of(index, tokens, salt), level[1])
        cached = replica.serve(tokens, rng.randint(1, 12), salt)
        if number > 5:  # names are checked by then
            assert level[1] == cached, f"request {number}"
        hits += cached > 0
        events = replica.cache.take_events()
        removals += sum(isinstance(event, BlocksRemoved) for event in events)
        tell(index, 0, events)
        if expectation is not None:
            index.over(expectation, computed=True)
        index.check_invariants()
        assert index.told.held(0) == len(replica.held()) and index.told.expected() == 0
    assert removals > 300 and hits > 100, "the test saw evictions and hits"
    state = index.state(0)
    assert state.telling and state.unannounced == 0 and state.unknown_parents == 0 and state.unnamed == 0
    if raw_hash is raw_block_hash and scheme:
        assert not state.translated and not index.notices
        assert index.told.names(0) == {block_name(digest) for digest in replica.held()}
    else:
        assert state.translated and bool(index.notices) == (scheme is not None)


def test_a_recorded_vllm_agrees_without_being_configured() -> None:
    """Its metrics name block size and algorithm; then every answer of the recording is foretold."""
    index = ExactIndex([BlockSettings()], ROOMY)
    index.blocks_reported(0, BLOCK_TOKENS, "sha256")
    assert index.namings == (BlockNaming("sha256", BLOCK_TOKENS),)
    batches = iter(wire_batches())
    for request in wire_requests():
        tokens = list(request.prompt_token_ids)
        chains = chains_of(index, tokens, request.cache_salt)
        ((_, matched),) = index.levels(chains, len(tokens)) or [(1, 0)]
        assert matched == request.cached_tokens
        expectation = index.sent(0, chains, matched)
        assert expectation is not None
        if matched // BLOCK_TOKENS < len(tokens) // BLOCK_TOKENS:
            tell(index, 0, list(next(batches).decoded.events))
        index.over(expectation, computed=True)
        index.check_invariants()
    state = index.state(0)
    assert (state.telling, state.translated, state.announced, state.unannounced) == (True, False, 17, 0), (
        "all but the first, which was sent before any event"
    )
    assert not index.notices


def test_h2_a_vllm_with_an_unknown_seed_is_translated_and_said_so() -> None:
    index = ExactIndex([BlockSettings("sha256", BLOCK_TOKENS, seed="0")], ROOMY)
    for batch in wire_batches()[:7]:
        tell(index, 0, list(batch.decoded.events))
    for request in wire_requests()[:5]:
        tokens = list(request.prompt_token_ids)
        levels = index.levels(chains_of(index, tokens, request.cache_salt), len(tokens))
        assert levels == [(1, 480)]
    ((replica, notice),) = index.notices
    assert replica == 0 and "block_hash_seed" in notice and index.state(0).naming == "tokens/32"


def test_without_events_what_was_sent_is_believed_within_capacity() -> None:
    index = ExactIndex([BlockSettings(None, SIZE)] * 2, 4 * SIZE)
    serve(index, 0, range(16))
    assert held_tokens(index, range(16), 2) == [12, 0], "the last token is always computed"
    assert held_tokens(index, range(17), 2) == [16, 0]
    serve(index, 0, range(100, 108))
    assert held_tokens(index, range(17), 2) == [8, 0], "tails make room"
    index.set_capacity(0, SIZE)
    assert sum(held_tokens(index, tokens, 2)[0] for tokens in (range(17), range(100, 109))) == SIZE


def test_K14_a_request_that_computed_nothing_leaves_nothing() -> None:
    """Black-box case 14, for both beliefs."""
    index = ExactIndex([BlockSettings("warmroute", SIZE)] * 2, ROOMY)
    index.stored(1, BlocksStored((1,), None, (9,) * SIZE, SIZE))  # replica 1 tells
    for replica in (0, 1):
        expectation = index.sent(replica, chains_of(index, range(17)), 0)
        assert held_tokens(index, range(17), 2)[replica] == 16, "siblings meet there"
        assert expectation is not None
        index.over(expectation, computed=False)
        assert held_tokens(index, range(17), 2) == [0, 0]
    index.check_invariants()


def test_events_are_the_truth_once_they_come() -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE)], ROOMY)
    serve(index, 0, range(17))
    assert held_tokens(index, range(17)) == [16]
    names = chains_of(index, range(17))[index.namings[0]]
    index.removed(0, BlocksRemoved((names[3],)))  # the first event ever: something else happened there
    assert held_tokens(index, range(17)) == [0]
    index.stored(0, BlocksStored(tuple(names[:2]), None, tuple(range(8)), SIZE))
    assert held_tokens(index, range(17)) == [8]


def test_after_a_loss_what_was_told_stays_and_the_rest_is_guessed() -> None:
    """The worked example of ``event_doubt``."""
    index = ExactIndex([BlockSettings("warmroute", 1)], ROOMY)
    naming = index.namings[0]
    asked = [1, 2, 4, 5, 6]
    a, b, d, e = naming.keys(asked[:4])
    c = naming.keys([1, 2, 3])[2]
    index.stored(0, BlocksStored((a, b, c), None, (1, 2, 3), 1))
    expectation = index.sent(0, chains_of(index, asked), 2)
    assert expectation is not None
    index.missed(0)
    index.over(expectation, computed=True)
    assert index.state(0).doubted and held_tokens(index, asked) == [4]
    index.removed(0, BlocksRemoved((e,)))
    assert held_tokens(index, asked) == [3]
    index.stored(0, BlocksStored((c,), b, (3,), 1))  # one copy, although it was still told of
    index.removed(0, BlocksRemoved((c,)))
    assert held_tokens(index, [1, 2, 3, 9]) == [2]
    index.check_invariants()
    index.removed(0, BlocksRemoved((d,)))  # the third removal of three blocks held: turned over
    assert not index.state(0).doubted and held_tokens(index, asked) == [2], "events alone count again"
    index.check_invariants()


def test_in_doubt_an_empty_answer_is_believed_and_the_doubt_stays() -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE)], ROOMY)
    names = tuple(chains_of(index, range(17))[index.namings[0]])
    index.stored(0, BlocksStored(names, None, tuple(range(16)), SIZE))
    assert not index.seems_empty(0) and held_tokens(index, range(17)) == [16], "events would tell"
    index.missed(0)
    assert index.seems_empty(0) and held_tokens(index, range(17)) == [0]
    assert index.state(0).doubted
    index.cleared(0)
    assert not index.state(0).doubted, "said so: nothing is missing"
    index.check_invariants()


def test_a_clear_and_a_loss_touch_one_replica() -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE)] * 2, ROOMY)
    names = tuple(chains_of(index, range(17))[index.namings[0]])
    for replica in (0, 1):
        index.stored(replica, BlocksStored(names, None, tuple(range(16)), SIZE))
    index.missed(0)
    assert held_tokens(index, range(17), 2) == [16, 16]
    index.removed(0, BlocksRemoved(names[1:]))
    assert held_tokens(index, range(17), 2) == [4, 16]
    index.cleared(1)
    assert held_tokens(index, range(17), 2) == [4, 0]


@pytest.mark.parametrize("configured", [None, 64])
def test_B127_block_sizes_are_the_replicas_to_say(configured: int | None) -> None:
    """Adapt per replica, and say so when the config is wrong."""
    index = ExactIndex([BlockSettings("warmroute", configured), BlockSettings("warmroute", 32)], ROOMY)
    index.blocks_reported(0, 16, None)
    assert {naming.block_tokens for naming in index.namings} == {16, 32}, "a mixed fleet"
    assert [text for _, text in index.notices] == (
        []
        if configured is None
        else [
            "blocks of 64 tokens are configured, it has blocks of 16: 16 is used; correct block_size in "
            "the config"
        ]
    )
    serve(index, 0, range(40))
    serve(index, 1, range(40))
    assert held_tokens(index, range(41), 2) == [32, 32]
    assert held_tokens(index, range(31), 2) == [16, 0]
    # Its events say otherwise: they know.
    naming = BlockNaming("warmroute", 8)
    index.stored(0, BlocksStored(tuple(naming.keys(range(24))), None, tuple(range(24)), 8))
    assert held_tokens(index, range(40), 2) == [24, 32]
    index.blocks_reported(0, 16, None)
    assert held_tokens(index, range(40), 2) == [24, 32], "the report is of another block size: ignored"


@pytest.mark.parametrize(
    ("algorithm", "scheme"),
    [("sha256", "sha256"), ("sha256_cbor", "sha256_cbor"), ("warmroute", "warmroute"), ("xxhash", "tokens")],
)
def test_algorithms_are_learned_unless_configured(algorithm: str, scheme: str) -> None:
    index = ExactIndex([BlockSettings(), BlockSettings("sha256", 16)], ROOMY)
    for replica in (0, 1):
        index.blocks_reported(replica, None, algorithm)
    assert (index.state(0).naming, index.state(1).naming) == (f"{scheme}/16", "sha256/16")
    index.check_invariants()


@pytest.mark.parametrize("late", [False, True], ids=["never announced", "announced just after the answer"])
def test_trust_is_lost_when_nothing_is_announced_and_earned_again(late: bool) -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE)], ROOMY)
    index.stored(0, BlocksStored((1,), None, (9,) * SIZE, SIZE))
    naming = index.namings[0]
    for number in range(SILENT_AFTER + 3):
        tokens = range(number * 100, number * 100 + 9)
        serve(index, 0, tokens)
        if late:
            index.stored(0, BlocksStored(tuple(naming.keys(tokens)), None, tuple(tokens)[:8], SIZE))
    state = index.state(0)
    assert state.telling == late
    if late:
        assert state.announced >= SILENT_AFTER and state.unannounced <= 1 and len(index.notices) == 1
        assert held_tokens(index, range(9)) == [8]
        return
    assert [text for _, text in index.notices][-1].startswith("8 requests in a row")
    assert held_tokens(index, range(9)) == [8], "guesses count again"
    tokens = range(5_000, 5_009)
    expectation = index.sent(0, chains_of(index, tokens), 0)
    assert expectation is not None
    index.stored(0, BlocksStored(tuple(naming.keys(tokens)), None, tuple(tokens)[:8], SIZE))
    index.over(expectation, computed=True)
    assert index.state(0).telling and held_tokens(index, range(9)) == [0]
    index.check_invariants()


def test_other_cache_groups_are_left_out() -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE)], ROOMY)
    event = BlocksStored((1,), None, (1,) * SIZE, SIZE, group=1)
    assert index.stored(0, event) == 0 and index.removed(0, BlocksRemoved((1,), group=2)) == 0
    assert index.state(0).other_groups == 2 and index.state(0).events == 0
    assert index.stored(0, replace(event, group=0)) == 1


def test_very_long_prompts_are_expected_in_part() -> None:
    index = ExactIndex([BlockSettings("warmroute", 1)], ROOMY)
    index.stored(0, BlocksStored((1,), None, (9,), 1))
    expectation = index.sent(0, chains_of(index, range(5_000)), 0)
    assert expectation is not None and index.told.expected() == EXPECTED_BLOCKS
    index.over(expectation, computed=True)
    assert index.told.expected() == 0


def test_in_text_mode_hashes_are_kept_as_they_come() -> None:
    index = ExactIndex([BlockSettings()], ROOMY, names_matter=False)
    stored = [
        event
        for batch in wire_batches()[:3]
        for event in batch.decoded.events
        if isinstance(event, BlocksStored)
    ]
    assert [index.stored(0, event) for event in stored] == [15, 15, 15]
    assert index.told.names(0) == {name for event in stored for name in event.block_hashes}
    assert index.state(0).naming == "tokens/16" and not index.notices


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_happens_expectations_end_and_the_parts_agree(data: st.DataObject) -> None:
    index = ExactIndex([BlockSettings("warmroute", SIZE), BlockSettings(None, SIZE)], 10 * SIZE)
    flights = []
    prompts = st.lists(st.integers(0, 2), min_size=SIZE, max_size=20)
    for _ in range(data.draw(st.integers(1, 40))):
        replica = data.draw(st.integers(0, 1))
        tokens = data.draw(prompts)
        blocks = len(tokens) // SIZE
        naming = BlockNaming("warmroute" if replica == 0 else "tokens", data.draw(st.sampled_from([SIZE, 2])))
        match data.draw(st.integers(0, 6)):
            case 0:
                matched = data.draw(st.integers(0, blocks)) * SIZE
                expectation = index.sent(replica, chains_of(index, tokens), matched)
                if expectation is not None:
                    flights.append(expectation)
            case 1 if flights:
                index.over(flights.pop(), computed=data.draw(st.booleans()))
            case 2 | 3:
                size = naming.block_tokens
                whole = tokens[: len(tokens) // size * size]
                index.stored(replica, BlocksStored(tuple(naming.keys(whole)), None, tuple(whole), size))
            case 4:
                index.removed(replica, BlocksRemoved(tuple(naming.keys(tokens))))
            case 5:
                data.draw(st.sampled_from([index.cleared, index.missed, index.seems_empty]))(replica)
            case _:
                index.blocks_reported(replica, data.draw(st.sampled_from([None, 2, SIZE])), None)
        index.check_invariants()
        held_tokens(index, tokens, 2)
    for expectation in flights:
        index.over(expectation, computed=False)
    assert index.told.expected() == 0


def test_a_tenants_unique_prompts_push_nobodys_blocks_out_of_the_index_but_those_the_engine_evicts() -> None:
    """Far more of them than the index's own bound; the replica's room is what counts."""
    rng = random.Random(3)
    replica = OurReplica(60)
    index = ExactIndex([BlockSettings("warmroute", SIZE)], 60 * SIZE, max_blocks=5)
    others = [rng.randrange(100) for _ in range(8 * SIZE + 1)]
    kept = evicted = 0
    for number in range(200):
        salt, tokens = ("acme", [rng.randrange(100) for _ in range(25)]) if number % 8 else ("bolt", others)
        chains = chains_of(index, tokens, salt)
        expectation = index.sent(0, chains, 0)
        replica.serve(tokens, 2, salt)
        tell(index, 0, replica.cache.take_events())
        assert expectation is not None
        index.over(expectation, computed=True)
        index.check_invariants()
        assert index.told.names(0) == {block_name(digest) for digest in replica.held()}
        bolts = {naming: naming.keys(others, "bolt") for naming in index.namings}
        hit = index.levels(bolts, len(others))
        kept += hit == [(1, 8 * SIZE)]
        evicted += hit == []
    assert kept > 100 and index.state(0).overflows == 0
    assert index.told.held(0) > 5, "more than the bound of an engine that does not tell its room"


@pytest.mark.parametrize("scheme", ["warmroute", None], ids=["own names", "translated"])
def test_a_full_slow_tier_costs_nobody_what_is_known_of_the_device(scheme: str | None) -> None:
    index = ExactIndex([BlockSettings(scheme, 1)], 2, max_blocks=4)  # type: ignore[arg-type]
    names = BlockNaming("warmroute", 1)

    def stored(tokens: range, medium: str | None) -> BlocksStored:
        return BlocksStored(tuple(names.keys(tokens)), None, tuple(tokens), block_size=1, medium=medium)

    index.stored(0, stored(range(2), None))
    for first in range(10, 60, 10):
        index.stored(0, stored(range(first, first + 2), "disk"))
    index.stored(0, stored(range(2), "disk"))  # a copy that is not kept
    assert index.state(0).unkept == 8 and index.told.held(0, "disk") == 4
    assert held_tokens(index, range(3)) == [2]
    index.removed(0, BlocksRemoved(tuple(names.keys(range(2))), "disk"))
    assert held_tokens(index, range(3)) == [2] and index.state(0).unknown_removals == 0
    index.removed(0, BlocksRemoved(tuple(names.keys(range(2)))))
    assert held_tokens(index, range(3)) == [0] and index.state(0).unnamed == 0
    index.removed(0, BlocksRemoved(tuple(names.keys(range(10, 12))), "disk"))
    assert index.told.held(0, "disk") == 2, "room again"
    index.stored(0, stored(range(60, 62), "disk"))
    assert index.told.held(0, "disk") == 4 and index.state(0).overflows == 0
    index.check_invariants()
