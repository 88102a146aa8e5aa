"""Cache events on the wire: recordings of a real vLLM, both forms, strange input."""

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract.block_hash import hash_number
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch
from replica.contract.kv_events_wire import EventFormatError, decode, encode
from tests.contract.vllm_readers import ArrayBatch, MapBatch

# Five of the batches a vLLM 0.32 published (block size 32; the second and third requests carry a cache_salt).
RECORDED = Path(__file__).parent / "data" / "vllm_kv_events.jsonl"


def recorded_payloads() -> dict[int, bytes]:
    rows = map(json.loads, RECORDED.read_text().splitlines())
    return {row["seq"]: bytes.fromhex(row["payload_hex"]) for row in rows}


def recorded() -> dict[int, EventBatch]:
    return {number: decode(payload) for number, payload in recorded_payloads().items()}


def test_a_recorded_vllm_prompt_is_one_stored_event():
    (event,) = recorded()[0].events
    assert isinstance(event, BlocksStored)
    assert len(event.block_hashes) == 15 and event.block_hashes[0] == 5507243326994724336
    assert event.parent_hash is None and event.block_size == 32
    assert len(event.token_ids) == 480 and event.token_ids[:2] == (2, 2889)
    assert (event.medium, event.adapter, event.salt, event.group) == ("GPU", None, None, 0)


def test_recorded_salts_are_seen():
    batches = recorded()
    assert [batches[seq].events[0].salt for seq in (0, 1, 2)] == [None, "tenant-a", "tenant-b"]


def test_recorded_evictions_come_before_what_replaced_them():
    events = recorded()[7].events
    assert [type(event) for event in events] == [BlocksRemoved] * 16 + [BlocksStored]
    assert events[0] == BlocksRemoved((684891982424371545,), "GPU", 0)


def test_a_recorded_batch_survives_both_of_our_forms():
    for batch in recorded().values():
        assert decode(encode(batch)) == batch
        assert decode(encode(batch, form="array")) == batch


DIGESTS = (bytes(range(32)), bytes(range(1, 33)))
STORED = BlocksStored(DIGESTS, None, (1, 2, 3, 4), 2, extra_keys=(("s",), None))
BATCH = EventBatch(12.5, (STORED, BlocksRemoved(DIGESTS[:1]), CacheCleared()), 3)


@pytest.mark.parametrize(("form", "reader"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_vllm_consumer_reads_ours(form, reader):
    batch = msgspec.msgpack.decode(encode(BATCH, form=form), type=reader)
    stored, removed, _cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert stored.block_hashes == [hash_number(d) for d in DIGESTS]
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, [1, 2, 3, 4], 2)
    assert (stored.medium, stored.extra_keys) == ("GPU", [("s",), None])
    assert removed.block_hashes == [hash_number(DIGESTS[0])] and removed.medium == "GPU"


def test_ours_have_the_fields_of_a_recorded_vllm_but_the_kind_of_its_groups():
    """What the wire itself names, not what a reader of either side makes of it."""
    theirs: dict[str, set[str]] = {}
    for wire in recorded_payloads().values():
        for event in msgspec.msgpack.decode(wire)[1]:
            theirs.setdefault(event["type"], set()).update(event)
    ours = {event["type"]: set(event) for event in msgspec.msgpack.decode(encode(BATCH))[1]}
    assert theirs["BlockStored"] - ours["BlockStored"] == {"kv_cache_spec_kind"}
    assert ours["BlockStored"] <= theirs["BlockStored"] and ours["BlockRemoved"] == theirs["BlockRemoved"]


@pytest.mark.parametrize(("form", "reader"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_vllm_consumer_reads_the_adapter_by_name_and_in_every_block_s_keys(form, reader):
    stored = BlocksStored(
        DIGESTS, None, (1, 2, 3, 4), 2, adapter="lora", extra_keys=(("lora", "s"), ("lora",))
    )
    batch = msgspec.msgpack.decode(encode(EventBatch(1.0, (stored,)), form=form), type=reader)
    (read,) = batch.events
    assert (read.lora_name, read.lora_id, read.group_idx) == ("lora", None, 0)
    assert read.extra_keys == [("lora", "s"), ("lora",)]


def test_digests_can_go_whole():
    assert decode(encode(BATCH, hashes="bytes")) == BATCH


def test_the_shortest_array_form_of_vllm_0_8_is_read():
    wire = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [1, 2], 2, None], ["BlockRemoved", [7]]]])
    assert decode(wire).events == (
        BlocksStored((7,), None, (1, 2), 2, medium=None, group=None),
        BlocksRemoved((7,), medium=None, group=None),
    )


def test_unknown_events_and_fields_are_skipped():
    wire = msgspec.msgpack.encode(
        [
            1.0,
            [
                {"type": "BlockMoved", "x": 1},
                ["BlockMoved", 1],
                {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "ownership": "x"},
            ],
            0,
            "later field",
        ]
    )
    assert decode(wire).events == (BlocksRemoved((1,), "CPU", None),)


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [{"block_hashes": [1]}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": 5}]]),
        msgspec.msgpack.encode([None, []]),
    ],
)
def test_what_is_no_batch_is_an_error_with_a_name(wire):
    with pytest.raises(EventFormatError):
        decode(wire)


@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(payload):
    with contextlib.suppress(EventFormatError):
        decode(payload)


@given(st.sampled_from(["map", "array"]), st.data())
def test_a_damaged_payload_raises_nothing_else(form, data):
    payload = bytearray(encode(BATCH, form=form))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(EventFormatError):
        for event in decode(bytes(payload)).events:
            assert isinstance(event, BlocksStored | BlocksRemoved | CacheCleared)


@pytest.mark.parametrize(
    ("parent", "adapter", "extra", "salt"),
    [
        (None, None, (("s",), None), "s"),
        (None, "lora", (("lora", "s"), ("lora",)), "s"),
        (None, "lora", (("lora",), ("lora",)), None),
        (None, None, ((("image", 4), "s"), None), "s"),
        (5, None, (("not a salt",), None), None),
        (None, None, None, None),
    ],
)
def test_salt_is_told_from_other_extra_keys(parent, adapter, extra, salt):
    assert BlocksStored((1, 2), parent, (1, 2), 1, adapter, extra_keys=extra).salt == salt


def test_sglang_s_salt_stands_beside_the_blocks():
    event = {
        "type": "BlockStored",
        "block_hashes": [-5, 7],  # SGLang's hashes are signed
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "tenant-a",
    }
    (stored,) = decode(msgspec.msgpack.encode([1.0, [event], 0])).events
    assert isinstance(stored, BlocksStored)
    assert (stored.block_hashes, stored.salt) == ((-5, 7), "tenant-a")
    del event["cache_salt"]
    (stored,) = decode(msgspec.msgpack.encode([1.0, [event], 0])).events
    assert isinstance(stored, BlocksStored) and stored.salt is None
