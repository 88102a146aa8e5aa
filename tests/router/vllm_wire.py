"""What a real vLLM did: its requests in order and the KV events it published meanwhile (data/NOTICE.txt)."""

import json
from dataclasses import dataclass
from pathlib import Path

from replica.contract.kv_events import EventBatch
from replica.contract.kv_events_wire import decode

DATA = Path(__file__).parent / "data"
BLOCK_TOKENS = 32
CAPACITY_BLOCKS = 119
"""Of 120 blocks vLLM keeps one for itself."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    cache_salt: str | None
    prompt_tokens: int
    cached_tokens: int
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WireBatch:
    seq: int
    payload: bytes

    @property
    def decoded(self) -> EventBatch:
        return decode(self.payload)


def wire_requests() -> list[WireRequest]:
    rows = map(json.loads, (DATA / "vllm_wire_requests.jsonl").read_text().splitlines())
    return [WireRequest(**(row | {"prompt_token_ids": tuple(row["prompt_token_ids"])})) for row in rows]


def wire_batches() -> list[WireBatch]:
    rows = map(json.loads, (DATA / "vllm_wire_events.jsonl").read_text().splitlines())
    return [WireBatch(row["seq"], bytes.fromhex(row["payload_hex"])) for row in rows]
