"""Known bugs of other engines, by the id of the public case; more of them in test_scheduler."""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from replica.config import ReplicaConfig
from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.kv_cache.cache_settings import CacheSettings
from replica.limits import RequestTooLong
from replica.model.load import LoadedModel
from replica.request import Delta, Request
from replica.server import app
from replica.server.app import start
from tests.replica.models import finish_all, greedy_request, make_engine, text_of, token_ids
from tests.replica.serving import faulty_engine, forcing_engine, get, post, replica, stream, until

BLOCK = 16
EMOJI = "\U0001f600".encode()
CACHES = {"blocks": CacheSettings(), "tree": CacheSettings("radix", 1)}


def _prompt(tokens: int, step: int = 37) -> tuple[int, ...]:
    return tuple((step * at + at // 7) % 256 for at in range(tokens))


def _alone(request: Request) -> list[int]:
    """The reply of a fresh engine without cache."""
    engine = make_engine(prefix_caching=False, max_model_len=2_048)
    return token_ids(finish_all(engine, [replace(request, request_id="alone")])["alone"])


def test_B011_what_fits_nowhere_is_refused_and_large_ones_take_turns() -> None:
    engine = make_engine(kv_blocks=64, max_model_len=64 * BLOCK + 1)
    with pytest.raises(RequestTooLong, match="1280"):
        engine.add(greedy_request("80 blocks", _prompt(80 * BLOCK), 1))
    with pytest.raises(RequestTooLong, match="1280"):
        engine.add(greedy_request("60 and 20", _prompt(60 * BLOCK), 20 * BLOCK))
    small = [greedy_request(f"small {at}", _prompt(20, step=41 + at), 6) for at in range(5)]
    large = [greedy_request(f"large {at}", _prompt(38 * BLOCK, step=3 + at), 40) for at in range(2)]
    deltas = finish_all(engine, [*large, *small])
    for request in (*small, *large):
        assert token_ids(deltas[request.request_id]) == _alone(request)
    assert engine.load().kv_usage == 0.0


def hanging_engine(goes_on: threading.Event) -> Callable[[LoadedModel, EngineLimits, int], Engine]:
    """Makes engines whose steps wait for ``goes_on``."""

    class HangingEngine(Engine):
        def step(self) -> list[Delta]:
            assert goes_on.wait(60)
            return super().step()

    return HangingEngine


def test_B012_a_step_that_hangs_fails_health_and_a_later_end_heals_it() -> None:
    goes_on = threading.Event()

    async def run() -> None:
        async with replica(hanging_engine(goes_on), hang_s=0.2) as running:
            assert (await get(running.url + "/health"))[0] == 200, "idle is no hang"
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
            asked = asyncio.create_task(post(running.url + "/v1/completions", body))

            async def unhealthy() -> bool:
                status, text = await get(running.url + "/health")
                return status == 503 and "in one step for" in text and "hang_s 0.2" in text

            await until(unhealthy)
            goes_on.set()
            assert (await asked)[0] == 200

            async def healthy() -> bool:
                return (await get(running.url + "/health"))[0] == 200

            await until(healthy)

    try:
        asyncio.run(run())
    finally:
        goes_on.set()


def test_B012_a_step_that_never_ends_does_not_keep_the_replica_from_stopping() -> None:
    goes_on = threading.Event()

    async def run() -> None:
        async with replica(hanging_engine(goes_on), hang_s=0.05) as running:
            asked = asyncio.create_task(post(running.url + "/v1/completions", {"prompt": "Hi"}))

            async def hangs() -> bool:
                return running.engine.turn_s > 0.0

            await until(hangs)
            assert await running.stop() is False
            assert not goes_on.is_set(), "it still hangs"
            (answered,) = await asyncio.gather(asked, return_exceptions=True)
            assert isinstance(answered, aiohttp.ClientError) or answered[0] == 500

    try:
        asyncio.run(run())
    finally:
        goes_on.set()


def test_B012_the_process_of_an_engine_that_died_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_and_ask(config: ReplicaConfig) -> app.Running:
        running = await start(config, make_engine=faulty_engine(lambda row: True, fatal=True))
        running.engine.submit([greedy_request("a", (1, 2, 3), 1)])
        return running

    monkeypatch.setattr(app, "start", start_and_ask)
    monkeypatch.setattr(app, "SHOW_FAILURE_S", 0.01)
    config = ReplicaConfig.model_validate(
        {"model": "tiny", "listen": "127.0.0.1:0", "threads": 1, "drain_s": 0, "kv_tokens": 4096}
    )
    assert app.run(config) == 1


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_B015_identical_prompts_of_one_tick_on_memory_full_of_junk(cache: CacheSettings) -> None:
    engine = make_engine(cache=cache, max_batched_tokens=64)
    engine._runner.kv._memory.fill_(1e4)
    asked = [greedy_request(f"{at}", _prompt(100), 8) for at in range(16)]
    for request in asked:
        engine.add(request)
    engine.step()
    engine.abort("0")  # the one that computes the prefix for all
    engine.check_invariants()
    got: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            got[delta.request_id] += [drawn.token for drawn in delta.tokens]
    wanted = _alone(asked[0])
    assert all(tokens == wanted for name, tokens in got.items() if name != "0")


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_B058_aborts_and_refusals_leak_no_block(cache: CacheSettings) -> None:
    chance = random.Random(58)
    engine = make_engine(kv_blocks=12, cache=cache, max_model_len=12 * BLOCK + 1)
    waiting: list[str] = []
    for number in range(400):
        kind = chance.random()
        if kind < 0.05:
            with pytest.raises(RequestTooLong):
                engine.add(greedy_request(f"{number}", _prompt(13 * BLOCK), 1))
        elif kind < 0.1 and waiting:
            with pytest.raises(ValueError, match="is in use"):
                engine.add(greedy_request(waiting[-1], _prompt(5), 1))
        else:
            prompt = _prompt(chance.randrange(1, 90), step=chance.choice((3, 5)))
            engine.add(greedy_request(f"{number}", prompt, chance.randrange(1, 8)))
            waiting.append(f"{number}")
        if waiting and chance.random() < 0.3:
            engine.abort(waiting.pop(chance.randrange(len(waiting))))
        if chance.random() < 0.7:
            for delta in engine.step():
                if delta.finish_reason is not None:
                    waiting.remove(delta.request_id)
    while engine.has_work:
        engine.step()
    engine.check_invariants()
    assert engine.load().kv_usage == 0.0
    whole = greedy_request("whole", _prompt(12 * BLOCK - 3, step=11), 4)
    assert token_ids(finish_all(engine, [whole])["whole"]) == _alone(whole)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_B067_a_match_from_before_the_wait_is_not_used(cache: CacheSettings) -> None:
    """Cached, then no room, then evicted by others, then admitted: computed anew and right."""
    engine = make_engine(kv_blocks=10, cache=cache, max_model_len=160, shares_prefills=False)
    first = greedy_request("first", _prompt(64), 2)
    finish_all(engine, [first])
    hogs = [greedy_request(f"hog {at}", _prompt(72, step=53 + at), 6) for at in range(3)]
    again = greedy_request("again", _prompt(64), 6)
    deltas = finish_all(engine, [*hogs, again])
    assert token_ids(deltas["again"]) == _alone(again)
    for hog in hogs:
        assert token_ids(deltas[hog.request_id]) == _alone(hog)
    assert deltas["again"][-1].cached_tokens <= 63


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_B085_the_check_holds_when_shared_prefixes_are_idle(cache: CacheSettings) -> None:
    engine = make_engine(cache=cache, kv_blocks=40)
    parts = {name: _prompt(24, step) for name, step in (("A", 3), ("B", 5), ("C", 7), ("D", 11))}
    for turn in range(100):
        for shape in ("A", "AB", "AC", "ABD"):
            prompt = [token for name in shape for token in parts[name]]
            finish_all(engine, [greedy_request(f"{turn} {shape}", prompt, 1)])  # checks, too
        assert engine.load().kv_usage == 0.0
        if turn % 25 == 24:
            assert engine.reset_prefix_cache()
            engine.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_B110_stop_strings_wherever_they_fall(seed: int) -> None:
    chance = random.Random(seed)
    free = text_of(finish_all(make_engine(), [greedy_request("free", _prompt(30, 5 + seed), 60)])["free"])
    for turn in range(12):
        start = chance.randrange(len(free) - 1)
        stop = free[start : start + chance.randrange(1, 21)]
        asked = greedy_request(f"{turn}", _prompt(30, 5 + seed), 60, stop_strings=(stop, stop + "?"))
        deltas = finish_all(make_engine(), [asked])[f"{turn}"]
        assert text_of(deltas) == free[: free.index(stop)]
        assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == stop
    held = greedy_request("held", _prompt(30, 5 + seed), 60, stop_strings=(free[-3:] + "\x00never",))
    deltas = finish_all(make_engine(), [held])["held"]
    assert text_of(deltas) == free and deltas[-1].finish_reason == "length"


def test_B110_a_stream_says_what_the_whole_answer_says() -> None:
    async def run() -> None:
        async with replica(batch_invariant=True) as running:
            url = running.url + "/v1/completions"
            body = {"model": "tiny", "prompt": list(_prompt(30)), "max_tokens": 40, "temperature": 0}
            free = (await post(url, body))[1]["choices"][0]["text"]
            for stop in (free[5], free[9:13], free[20:38], free[:2], free[-1:], "never \u00e9"):
                _, answer = await post(url, body | {"stop": stop})
                events = await stream(url, body | {"stop": stop})
                told = "".join(event["choices"][0]["text"] for event in events[:-1])
                choice = answer["choices"][0]
                assert told == choice["text"] and stop not in told
                assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("forced", "text"),
    [
        (EMOJI[2:], "\ufffd\ufffd"),  # the prompt's other half is no character of its own
        ("\u00e9\u4f60a".encode(), "\u00e9\u4f60a"),
        ("a\u4f60".encode()[:-1], "a\ufffd"),  # max_tokens cuts a character
        (b"a" + EMOJI + EMOJI[:1], "a\U0001f600\ufffd"),
    ],
)
def test_B111_a_prompt_that_ends_inside_a_character_shows_in_no_answer(forced: bytes, text: str) -> None:
    """Bytes are tokens: two of an emoji's four end the prompt. Streamed and whole, the same."""

    async def run() -> None:
        async with replica(forcing_engine(forced)) as running:
            url = running.url + "/v1/completions"
            body = {"prompt": [*b"hi ", *EMOJI[:2]], "max_tokens": len(forced), "temperature": 0}
            _, answer = await post(url, body)
            assert answer["choices"][0]["text"] == text and answer["choices"][0]["finish_reason"] == "length"
            pieces = [event["choices"][0]["text"] for event in (await stream(url, body))[:-1]]
            assert "".join(pieces) == text
            assert all("\ufffd" not in piece for piece in pieces[:-1]) or forced == EMOJI[2:]

    asyncio.run(run())


def test_B130_prompt_log_probabilities_are_refused_and_the_engine_goes_on() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/completions"
            body: dict[str, Any] = {"model": "tiny", "prompt": list(_prompt(60)), "max_tokens": 3}
            for _ in range(2):
                plain = asyncio.create_task(post(url, body))
                for refused in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}):
                    status, answer = await post(url, body | refused)
                    assert status == 400 and "prompt" in answer["error"]["message"]
                assert (await plain)[0] == 200
            status, answer = await post(url, body | {"logprobs": 2})
            assert status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
            assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 3

    asyncio.run(run())
