"""What diagnose replays is what a real replica does: a log of one leaves next to nothing unexplained."""

import asyncio
import random
from pathlib import Path

import pytest

from replica.server.app import Running
from sim.diagnose.account import Cause
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.sample import open_sample
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from tests.replica.serving import post, replica
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


@pytest.mark.parametrize(
    ("kv_tokens", "unexplained"), [(16_384, 0.0), (1_536, 0.02)], ids=["ample", "too small"]
)
def test_a_log_of_a_real_replica_is_explained(tmp_path: Path, kv_tokens: int, unexplained: float) -> None:
    diagnosis = diagnosed(tmp_path, kv_tokens)
    account = diagnosis.account
    assert account.cached_tokens > 0
    assert abs(account.tokens(Cause.ENGINE)) <= unexplained * account.prompt_tokens
    assert (account.tokens(Cause.CAPACITY) > 0) == (unexplained > 0)
