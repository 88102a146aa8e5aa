"""Replicas with roles, prompts long enough for two steps, and what each replica was sent."""

import json
from typing import Any

from replica.contract.kv_source import read_kv_source
from tests.fakes.fake_replica import (
    FakeReplica,
    Plan,
    SeenRequest,
    Send,
    completion,
    sized,
)
from tests.fakes.proxy_rig import Rig

LONG = {"model": "m", "messages": [{"role": "user", "content": "long " * 8_000}]}
"""10,000 tokens: 629 ms of prefill, 69 ms to move."""
STREAM = LONG | {"stream": True, "max_tokens": 50, "min_tokens": 5, "stream_options": {"include_usage": True}}
KEY = "of-all-routers"
PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [1, 2],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}

PREFILL = {"role": "prefill", "kv_source": "10.0.0.1:8400"}
DECODE = {"role": "decode", "kv_pull": "warmroute"}
OURS = [PREFILL, DECODE, DECODE]
VLLM = [{"role": role, "kv_pull": "vllm"} for role in ("prefill", "decode")]


def sent(replica: FakeReplica, at: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(replica.requests[at].body)
    return body


def answerers(rig: Rig) -> list[FakeReplica]:
    return [one for one in rig.replicas[1:] if one.requests]


def vllm_prefill(request: SeenRequest) -> Plan:
    """What vLLM answers with its NIXL connector."""
    assert json.loads(request.body)["kv_transfer_params"]["do_remote_decode"] is True
    answer = json.loads(completion(prompt=10_000)) | {"kv_transfer_params": PARAMS}
    return [Send(sized(json.dumps(answer).encode()))]


def source_of(request: SeenRequest) -> str:
    value = request.field("x-warmroute-kv-source")
    source = read_kv_source(value or "")
    assert source is not None and source.signed_by(KEY.encode()), value
    return source.address


LLMD = [{"role": role, "kv_pull": "llm-d"} for role in ("prefill", "decode", "decode")]
