"""Cache events as vLLM puts them on ZMQ: msgpack, events as maps (0.24 and later) or arrays (before).

A payload is ``[timestamp, [event, ...], data_parallel_rank]``. As a map an event is
``{"type": "BlockStored", "block_hashes": ..., ...}``; as an array it is the same fields in order, the type
first. Reading takes both, and skips events and fields it does not know: a newer engine must not silence an
older router.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from replica.contract.block_hash import hash_number
from replica.contract.kv_events import (
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    EventBatch,
    ExtraKeys,
)

Form = Literal["map", "array"]
HashForm = Literal["int", "bytes"]

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"

# Field order of the array form, as it grew: medium since 0.10, lora_name, extra_keys, group_idx until 0.23.
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_FIELDS: dict[str, tuple[str, ...]] = {STORED: _STORED_FIELDS, REMOVED: _REMOVED_FIELDS, CLEARED: ()}


class EventFormatError(ValueError):
    """A payload that is not a batch of cache events; says what was found."""


def encode(batch: EventBatch, *, form: Form = "map", hashes: HashForm = "int") -> bytes:
    """One payload. ``hashes="int"`` sends digests as their low 64 bits, vLLM's default."""
    events = [_to_wire(event, form, hashes) for event in batch.events]
    return msgspec.msgpack.encode([batch.timestamp_s, events, batch.data_parallel_rank])


def decode(payload: bytes) -> EventBatch:
    """The batch in a payload of either form. Raises EventFormatError when it is no batch of events."""
    try:
        message = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(f"not msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], list):
        raise EventFormatError(f"expected [timestamp, events, rank], found {type(message).__name__}")
    rank = message[2] if len(message) > 2 else None
    try:
        events = tuple(event for wire in message[1] if (event := _from_wire(wire)) is not None)
        return EventBatch(float(message[0]), events, rank)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EventFormatError(f"malformed event: {error!r}") from error


def _to_wire(event: CacheEvent, form: Form, hashes: HashForm) -> object:
    kind, fields = _fields_of(event, hashes)
    if form == "map":
        return {"type": kind, **fields}
    return [kind, *(fields[name] for name in _FIELDS[kind] if name in fields)]


def _fields_of(event: CacheEvent, hashes: HashForm) -> tuple[str, dict[str, object]]:
    """Type and fields, in the order of the array form; trailing optional ones left out."""
    match event:
        case BlocksStored():
            parent = event.parent_hash
            fields: dict[str, object] = {
                "block_hashes": [_hash(value, hashes) for value in event.block_hashes],
                "parent_block_hash": None if parent is None else _hash(parent, hashes),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.adapter,
                "extra_keys": event.extra_keys,
            }
            if event.group is not None:
                fields["group_idx"] = event.group
            return STORED, fields
        case BlocksRemoved():
            fields = {
                "block_hashes": [_hash(value, hashes) for value in event.block_hashes],
                "medium": event.medium,
            }
            if event.group is not None:
                fields["group_idx"] = event.group
            return REMOVED, fields
        case CacheCleared():
            return CLEARED, {}


def _hash(value: BlockHash, hashes: HashForm) -> BlockHash:
    return hash_number(value) if isinstance(value, bytes) and hashes == "int" else value


def _from_wire(wire: object) -> CacheEvent | None:
    if isinstance(wire, Mapping):
        kind, fields = wire["type"], wire
    elif isinstance(wire, list) and wire:
        kind = wire[0]
        fields = dict(zip(_FIELDS.get(kind, ()), wire[1:], strict=False))
    else:
        raise TypeError(f"an event is a map or an array, found {type(wire).__name__}")
    if kind == STORED:
        return BlocksStored(
            block_hashes=_hashes(fields["block_hashes"]),
            parent_hash=None if (parent := fields["parent_block_hash"]) is None else _hashes([parent])[0],
            token_ids=tuple(fields["token_ids"]),
            block_size=int(fields["block_size"]),
            adapter=fields.get("lora_name"),
            medium=fields.get("medium"),
            extra_keys=_extra_keys(fields.get("extra_keys")) or _sglang_salt(fields),
            group=fields.get("group_idx"),
        )
    if kind == REMOVED:
        return BlocksRemoved(_hashes(fields["block_hashes"]), fields.get("medium"), fields.get("group_idx"))
    return CacheCleared() if kind == CLEARED else None


def _hashes(wire: Any) -> tuple[BlockHash, ...]:
    if not isinstance(wire, list) or not all(isinstance(value, int | bytes) for value in wire):
        raise TypeError("block hashes are a list of integers or byte strings")
    return tuple(wire)


def _extra_keys(wire: Iterable[Any] | None) -> tuple[ExtraKeys | None, ...] | None:
    """Per-block extra keys; None when no block has any."""
    if wire is None:
        return None
    keys = tuple(
        None if block is None else tuple(tuple(key) if isinstance(key, list) else key for key in block)
        for block in wire
    )
    return keys if any(keys) else None


def _sglang_salt(fields: Mapping[str, Any]) -> tuple[ExtraKeys | None, ...] | None:
    """SGLang sends a salt beside the blocks; vLLM sends it in the first block's extra keys."""
    salt = fields.get("cache_salt")
    if not isinstance(salt, str) or not salt:
        return None
    return ((salt,), *[None] * (len(fields["block_hashes"]) - 1))
