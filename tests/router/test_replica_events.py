"""Our replica tells, our router listens: a real engine with a tiny pool, exact mode and text mode."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from replica.server.app import Running as Replica
from router.routing.block_index import block_name
from tests.fakes.proxy_rig import until
from tests.replica.serving import replica as serving
from tests.router.test_exact_mode import Running, with_router
from tests.router.tokenizer_folder import write_folder

EVENTS = {"endpoint": "tcp://127.0.0.1:*", "bind": True, "replay": "tcp://127.0.0.1:*"}
POOL_BLOCKS = 24


def _prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    heads = [[rng.randrange(256) for _ in range(64)] for _ in range(4)]
    return [
        rng.choice(heads)[: rng.choice([0, 16, 40, 64])]
        + [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        for _ in range(count)
    ]


async def _send(running: Running, prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Each prompt in turn; tokens matched as the router said, tokens cached as the engine said."""
    seen = []
    for number, prompt in enumerate(prompts):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1 + number % 20, "temperature": 0}
        matched, answer = await running.ask("/v1/completions", body)
        seen.append((matched, answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return seen


async def _send_until(running: Running, condition: Callable[[], bool], seed: int) -> None:
    """Prompt after prompt, each with a while to be heard of: what is told before the subscription is there,
    or is there again, is only learned with the next event."""
    for prompt in _prompts(50, seed):
        await _send(running, [prompt])
        with suppress(AssertionError):
            await until(condition, limit_s=0.2)
            return
    raise AssertionError("the condition did not come true")


def _engine_s(replica: Replica) -> set[int]:
    """What the engine's cache holds."""
    return {block_name(digest) for digest in replica.engine._engine._scheduler.cache.cached_hashes()}


def _told(running: Running) -> set[int]:
    """What the router was told of it."""
    return running.router.fleet.caches.exact.told.names(0)


def _entry(replica: Replica) -> dict[str, Any]:
    assert replica.events is not None
    where = {"endpoint": replica.events.endpoint, "replay": replica.events.replay_endpoint}
    return {"url": replica.url, "name": "r", "kind": "warmroute", "kv_events": where}


def _models(tmp_path: Path) -> dict[str, Any]:
    from replica.model.tiny import CHAT_TEMPLATE, tiny_tokenizer

    folder = write_folder(tmp_path, tiny_tokenizer().to_json(), CHAT_TEMPLATE)
    return {"tiny": {"tokenizer": str(folder), "renders_as": "warmroute"}}


@pytest.mark.parametrize("cache", [{"kind": "blocks"}, {"kind": "radix", "page_size": 4}], ids=str)
def test_the_router_holds_the_engine_s_blocks_through_evictions_a_gap_a_reset_and_a_restart(
    tmp_path: Path, cache: dict[str, Any]
) -> None:
    async def run() -> None:
        async def scenario(running: Running) -> None:
            counters = running.router.counters.kv_events["r"]
            await _send_until(running, lambda: counters.batches > 0, seed=1)
            await until(lambda: _told(running) == _engine_s(first))
            seen = []
            for prompt in _prompts(80):
                seen += await _send(running, [prompt])
                await until(lambda: _told(running) == _engine_s(first))
            # A page of the tree is a quarter of a block: a hit may go on for some more.
            finer = 16 if cache["kind"] == "radix" else 1
            assert all(matched <= cached < matched + finer for matched, cached in seen)
            assert sum(cached for _, cached in seen) > 500 and counters.removed_events > 50
            state = running.router.fleet.caches.exact.state(0)
            assert state.telling and not state.translated
            assert (await running.cache())["blocks"]["naming"] == "warmroute/16"
            assert running.router.fleet.caches.exact._capacity_tokens[0] == POOL_BLOCKS * 16

            # Batches that get lost on their way are asked for again.
            publisher, gaps = first.events, counters.gaps
            assert publisher is not None
            socket, publisher._events = publisher._events, _Nowhere()  # type: ignore[assignment]
            await _send(running, _prompts(6, seed=9))
            publisher._events = socket
            assert _told(running) != _engine_s(first)
            await _send(running, _prompts(1, seed=10))
            await until(lambda: _told(running) == _engine_s(first))
            assert counters.gaps == gaps + 1 and counters.lost == counters.replay_failures == 0

            async with running.session.post(first.url + "/reset_prefix_cache") as answer:
                assert (await answer.json())["success"]
            await until(lambda: _told(running) == set())
            await _send(running, _prompts(5, seed=11))
            await until(lambda: _told(running) == _engine_s(first) != set())

            # Another process under the same addresses, with an empty cache.
            await first.stop()
            keys = dict(_entry(first)["kv_events"], bind=True)
            async with serving(
                listen=f"127.0.0.1:{first.port}", kv_tokens=POOL_BLOCKS * 16, cache=cache, kv_events=keys
            ) as second:
                await until(lambda: running.router.fleet.ready)
                await _send_until(running, lambda: counters.restarts == 1, seed=12)
                await until(lambda: _told(running) == _engine_s(second))

        first_context = serving(kv_tokens=POOL_BLOCKS * 16, cache=cache, kv_events=EVENTS)
        first = await first_context.__aenter__()
        await with_router(scenario, [_entry(first)], models=_models(tmp_path))

    uvloop.run(run())


def test_the_router_knows_what_lies_on_which_tier(tmp_path: Path) -> None:
    tiers = {"host_mib": 1, "disk_path": str(tmp_path / "kv"), "disk_mib": 2, "prefill_us_per_token": 1e6}

    async def run() -> None:
        async with serving(kv_tokens=POOL_BLOCKS * 16, kv_events=EVENTS, tiers=tiers) as replica:

            async def scenario(running: Running) -> None:
                told = running.router.fleet.caches.exact.told
                shelves = replica.engine._engine._tiers._tiers.shelves
                counters = running.router.counters.kv_events["r"]
                await _send_until(running, lambda: counters.batches > 0, seed=1)
                seen = await _send(running, _prompts(80))
                assert sum(matched < cached for matched, cached in seen) > 5, "some came from below"
                await until(lambda: _told(running) == _engine_s(replica))
                for tier, shelf in shelves.items():
                    expected = {block_name(digest) for digest in shelf.hashes}
                    await until(lambda tier=tier, expected=expected: told.names(0, tier.value) == expected)
                    assert expected
                assert not running.router.fleet.caches.exact.state(0).translated

            await with_router(scenario, [_entry(replica)], models=_models(tmp_path / "model"))

    uvloop.run(run())


class _Nowhere:
    """A socket whose messages get lost."""

    def send_multipart(self, frames: list[bytes]) -> None:
        """As PUB does with a full queue."""


@pytest.mark.parametrize("form", ["map", "array"])
def test_in_text_mode_a_reset_is_heard(form: str) -> None:
    async def run() -> None:
        async with serving(kv_events=EVENTS | {"form": form}) as replica:

            async def scenario(running: Running) -> None:
                counters, index = running.router.counters.kv_events["r"], running.router.fleet.index
                await until(lambda: running.router.fleet.ready)
                await _send_until(running, lambda: counters.batches > 0, seed=1)
                body = {"model": "tiny", "prompt": "once upon a time " * 20, "max_tokens": 1}
                await running.ask("/v1/completions", body)
                assert index.held(0) > 0
                async with running.session.post(replica.url + "/reset_prefix_cache") as answer:
                    assert (await answer.json())["success"]
                await until(lambda: counters.cleared_events == 1)
                assert index.held(0) == 0 and counters.malformed == 0

            await with_router(scenario, [_entry(replica)])

    uvloop.run(run())
