"""What diagnose replays is what a real replica does: a log of one leaves next to nothing unexplained."""

import asyncio
import random
from pathlib import Path

import pytest

from replica.server.app import Running
from sim.diagnose.account import Cause
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.request_log import LoggedRequest
from sim.diagnose.sample import open_sample, sample_of_log
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from tests.replica.serving import post, replica
from tests.router.vllm_wire import BLOCK_TOKENS, CAPACITY_BLOCKS, wire_requests
from tests.sim.diagnose_logs import Row, words, write

CONVERSATIONS, TURNS = 3, 4


async def recorded(running: Running) -> list[Row]:
    """Conversations with a real replica, turn by turn, as a router would log them."""
    rng = random.Random(1)
    said: list[list[Row]] = [[{"role": "system", "content": words(rng, 30)}] for _ in range(CONVERSATIONS)]
    rows = []
    for _ in range(TURNS):
        for messages in said:
            messages.append({"role": "user", "content": words(rng, 15)})
            body = {"messages": list(messages), "max_tokens": 4, "temperature": 0}
            status, answer = await post(running.url + "/v1/chat/completions", body)
            assert status == 200, answer
            _, tokens = await post(running.url + "/tokenize", {"messages": list(messages)})
            usage = answer["usage"]
            rows.append({"body": body, "usage": usage, "prompt_token_ids": tokens["tokens"], "replica": "r0"})
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return rows


def diagnosed(folder: Path, kv_tokens: int) -> Diagnosis:
    async def run() -> list[Row]:
        async with replica(kv_tokens=kv_tokens) as running:
            return await recorded(running)

    sample = open_sample(write(folder, asyncio.run(run())))
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=kv_tokens))
    return diagnose(
        sample, ["predicted_finish"], replicas=1, rate=1.0, seed=1, settings=settings, warmup_share=0.0
    )


def test_the_log_of_a_real_vllm_is_explained() -> None:
    """Two salts and an eviction (tests/router/data): what it reported is what is replayed, to the token."""
    rows = [
        LoggedRequest(
            line,
            body={"prompt": list(one.prompt_token_ids), "cache_salt": one.cache_salt},
            token_ids=one.prompt_token_ids,
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
        )
        for line, one in enumerate(wire_requests(), 1)
    ]
    kv_tokens = CAPACITY_BLOCKS * BLOCK_TOKENS
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=kv_tokens))
    sample = sample_of_log("vllm", rows, BLOCK_TOKENS)
    diagnosis = diagnose(
        sample, ["predicted_finish"], replicas=1, rate=1.0, seed=1, settings=settings, warmup_share=0.0
    )
    account = diagnosis.account
    assert account.cached_tokens == sum(row.cached_tokens or 0 for row in rows) > 0
    assert account.tokens(Cause.ENGINE) == 0
    assert account.tokens(Cause.CAPACITY) > 0
    assert account.tokens(Cause.SALT) > 0


@pytest.mark.parametrize(
    ("kv_tokens", "unexplained"), [(16_384, 0.0), (1_536, 0.02)], ids=["ample", "too small"]
)
def test_a_log_of_a_real_replica_is_explained(tmp_path: Path, kv_tokens: int, unexplained: float) -> None:
    diagnosis = diagnosed(tmp_path, kv_tokens)
    account = diagnosis.account
    assert account.cached_tokens > 0
    assert abs(account.tokens(Cause.ENGINE)) <= unexplained * account.prompt_tokens
    assert (account.tokens(Cause.CAPACITY) > 0) == (unexplained > 0)
