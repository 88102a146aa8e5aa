"""Images in both caches: the same placeholders under another image are never handed out."""

import pytest

from replica.contract.block_hash import chain, raw_block_hash, root_hash
from replica.contract.multimodal import MultimodalItem
from replica.hot_prefixes import HotPrefixes
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.peers.peer_wire import MAC_BYTES, Question, question_sizes, read_question, written_question
from replica.prefix_load import PrefixLoads
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from tests.replica.cache_steps import compute, hit, request, run, start
from tests.replica.caches import CACHES, PAGE
from tests.replica.toy_engine import ToyEngine

PLACEHOLDER = 9
TEXT = [1, 2, 3, 4, 5]


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def picture(name, offset=5, tokens=6):
    return MultimodalItem(name, offset, tokens)


def about(name, question=(7, 7, 7, 7, 7)):
    """Five tokens of text, six that stand for the image, a question; blocks are of four tokens."""
    return request(name, [*TEXT, *[PLACEHOLDER] * 6, *question], multimodal=[picture(name)])


def test_m9_the_same_images_are_hit_and_named_by_their_offsets():
    cache = PrefixCache(10, record_events=True)
    images = [MultimodalItem("a", 11, 10), MultimodalItem("b", 30, 18), MultimodalItem("c", 48, 7)]
    first = Sequence("first", range(55), 8, multimodal=images)
    assert start(cache, first) == 0
    (event,) = cache.take_events()
    assert event.extra_keys == ((("a", 11),), (("a", -5), ("b", 14)), (("b", -2),))
    assert event.block_hashes == tuple(chain(range(55), 16, root_hash(), items=images))
    first.token_ids += range(9)
    first.output_tokens = 9
    cache.extend(first)
    first.computed_tokens = 64
    cache.publish(first)
    (event,) = cache.take_events()
    assert event.extra_keys == ((("c", 0),),)
    again = Sequence("again", [*range(55), 1], 8, multimodal=images)
    assert start(cache, again) == 48
    cache.check_invariants([first, again])


def test_the_same_image_is_hit_another_from_its_block_on_is_not(make):
    cache = make(200)
    run(cache, about("cat"))
    before_it = 5 if cache.block_size == 1 else 4
    for name, found in (("cat", 15 if cache.block_size == 1 else 12), ("dog", before_it)):
        held = about(name)
        assert start(cache, held) == found
        cache.check_invariants([held])
        cache.release(held)
    assert hit(cache, [*TEXT, *[PLACEHOLDER] * 6, 7]) == before_it, "and text with such tokens is no image"
    moved = request("cat", [*TEXT, *[PLACEHOLDER] * 7], multimodal=[picture("cat", 6)])
    assert run(cache, moved) == before_it, "nor the image one token later"


def test_events_name_blocks_by_the_image_in_them(make):
    cache = make(200, record_events=True)
    for name in ("cat", "dog"):
        asked = about(name)
        run(cache, asked)
        told = [one for event in cache.take_events() for one in event.block_hashes]
        named = chain(asked.token_ids, PAGE, root_hash(), items=asked.multimodal)
        assert told == named[name == "dog" :], "the block before the image is told of once"
    assert len(list(cache.cached_hashes())) == 7


def test_a_colliding_hash_hands_out_no_other_image(make):
    cache = make(400, raw_hash=lambda parent, raw: bytes([raw_block_hash(parent, raw)[0] & 1]))
    held = [about(name) for name in "abcdefgh"]
    for sequence in held:
        assert start(cache, sequence) == (4 if sequence is not held[0] else 0) + (
            cache.block_size == 1 and sequence is not held[0]
        )
    cache.check_invariants(held)
    for sequence in held:
        again = about(sequence.request_id)
        assert start(cache, again) >= 12
        shared = 12 // cache.block_size
        assert again.block_table[:shared] == sequence.block_table[:shared]
        cache.release(again)


def test_nobody_waits_for_the_prefill_of_another_image(make):
    cache = make(200)
    owner = about("cat", range(20, 40))
    cache.adopt(owner, cache.match(owner))
    for name, waits in (("cat", True), ("dog", False)):
        other = about(name, range(20, 40))
        cache.match(other)
        first_of_image = 4 // cache.block_size + (cache.block_size == 1)
        assert cache.will_publish(owner, other, first_of_image) is waits


def test_a_state_is_not_restored_for_another_image(make):
    cache = HybridCache(make(200), StateCheckpoints(4))
    sequence, at = about("cat"), 0
    assert cache.adopt(sequence, cache.match(sequence))
    while at < sequence.total_tokens:
        stop = cache.chunk_stop(sequence, sequence.total_tokens)
        cache.states.ran(sequence, at, stop)
        sequence.computed_tokens = at = stop
        cache.publish(sequence)
    cache.release(sequence)
    assert len(cache.match(about("cat"))) * cache.block_size == 12
    assert len(cache.match(about("dog"))) == 0


def test_a_preempted_sequence_finds_its_own_image(make):
    toy = ToyEngine(
        Scheduler(make(48), SchedulerLimits(max_running=4, max_batched_tokens=24, max_model_len=40))
    )
    for name in ("cat", "dog", "cow"):
        toy.scheduler.add(Sequence(name, about(name).token_ids, 14, multimodal=[picture(name)]))
    toy.drain()  # checks every step
    assert toy.scheduler.preemptions > 0


def test_hot_images_have_their_own_heat():
    cache = PrefixCache(100, 16)
    hot = HotPrefixes(cache, max_blocks=8, hot_after=3)
    for number in range(6):
        image = MultimodalItem("cat" if number % 2 else "dog", 0, 8)
        sequence = Sequence(f"{number}", [*range(16), number, 1], 1, multimodal=[image])
        cache.adopt(sequence, cache.match(sequence))
        hot.admitted(sequence)
        compute(cache, sequence)
        cache.release(sequence)
    assert hot.blocks == 0, "two matches of each, not four of one"


def test_a_load_from_another_tier_keeps_the_image():
    cache = PrefixCache(100, 4)
    loads, wanted = PrefixLoads(cache), about("cat")
    load = loads.begin(wanted, 12)
    loads.arrived(load, 12)
    loads.end(load)
    assert len(cache.match(wanted)) == 3 and len(cache.match(about("dog"))) == 1
    assert list(cache.block_hashes(load.loader)) == list(cache.block_hashes(wanted))[:3]


def test_a_part_of_a_prompt_has_the_images_that_begin_in_it():
    images = [picture("cat", 2, 3), picture("dog", 8, 2)]
    whole = Sequence("a", range(12), 1, multimodal=images)
    assert whole.prefix("b", 4).multimodal == (images[0],)


def test_a_peer_is_asked_for_the_image_too():
    images = (picture("cat", 2, 3), picture("dog", 8, 2))
    asked = Question("print", None, None, 64, ((0, 2),), bytes(32), images)
    said = written_question(asked, b"nonce", b"key")
    head, _ = question_sizes(said[:16])
    assert read_question(said[:-MAC_BYTES], head, said[-MAC_BYTES:], b"nonce", b"key") == asked


def test_images_outside_the_prompt_are_refused():
    scheduler = Scheduler(
        PrefixCache(8, 4), SchedulerLimits(max_running=1, max_batched_tokens=8, max_model_len=20)
    )
    with pytest.raises(ValueError, match="item 'cat' at 5 to 11: expected"):
        scheduler.add(Sequence("a", range(10), 1, multimodal=[picture("cat")]))
