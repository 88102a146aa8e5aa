"""The engine: the same tokens whatever the cache, the batch and the chunks; stops, seeds, failures."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from replica.batch import Batch, Work
from replica.engine import Engine, EngineBroken
from replica.model.runner import ModelRunner
from replica.model.sampling import Sampling, StopRule
from replica.request import Delta, Request
from tests.replica.models import (
    finish_all,
    greedy_request,
    make_engine,
    text_of,
    tiny,
    token_ids,
)


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(256) for _ in range(length))


def _alone(request: Request) -> list[int]:
    """The tokens of a request that has a fresh engine without a cache to itself."""
    engine = make_engine(prefix_caching=False, batch_invariant=True)
    return token_ids(finish_all(engine, [request])[request.request_id])


# Equality


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefix_caching": False},
        {"max_batched_tokens": 8, "max_running": 8},
        {"max_batched_tokens": 33, "max_running": 2},
        {"kv_blocks": 12, "max_model_len": 160},
        {"block_size": 4, "kv_blocks": 40, "max_model_len": 160},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_cache_batch_and_chunks_do_not_change_a_token(limits: dict[str, Any]) -> None:
    shared = _prompt(1, 80)
    requests = [
        greedy_request(f"{i}", shared[: 16 * (i % 6)] + _prompt(i, 1 + 5 * i), 6 + i) for i in range(12)
    ]
    expected = {request.request_id: _alone(request) for request in requests}
    engine = make_engine(**limits)
    for _ in range(2):  # cold, then warm
        deltas = finish_all(engine, requests)
        assert {name: token_ids(found) for name, found in deltas.items()} == expected
    if limits.get("prefix_caching", True):
        assert any(found[-1].cached_tokens > 0 for found in deltas.values())
    else:
        assert all(found[-1].cached_tokens == 0 for found in deltas.values())
    assert engine.load().kv_usage == 0.0


def test_another_prompt_has_another_continuation() -> None:
    """Without this, equality of tokens would say little about whose KV was used."""
    base = _prompt(2, 100)
    expected = _alone(greedy_request("a", base, 12))
    changed = [(*base[:place], (base[place] + 1) % 256, *base[place + 1 :]) for place in range(0, 100, 5)]
    others = [_alone(greedy_request("a", prompt, 12)) for prompt in changed]
    assert sum(other != expected for other in others) >= 12  # of 20; seen: 15


def test_preemption_loses_nothing() -> None:
    engine = make_engine(kv_blocks=8, max_model_len=128)
    requests = [greedy_request(f"{i}", _prompt(i, 30), 60) for i in range(3)]
    deltas = finish_all(engine, requests)
    assert engine.preemptions > 0
    for request in requests:
        assert token_ids(deltas[request.request_id]) == _alone(request)


def _skipped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Debug counter: prompt tokens whose prefill was skipped, by request, from what the runner was given.

    A request's first row starts where its computing starts; what it does again after a preemption is no
    second chance to skip.
    """
    starts: dict[str, int] = {}
    run = engine._run

    def counted(batch: Batch) -> Any:
        for row in batch.rows:
            starts.setdefault(row.sequence.request_id, row.start)
        return run(batch)

    monkeypatch.setattr(engine, "_run", counted)
    return starts


def _told(deltas: dict[str, list[Delta]]) -> dict[str, int]:
    """``cached_tokens`` of finished requests, as ``usage`` has them."""
    return {name: each[-1].cached_tokens for name, each in deltas.items()}


def test_B112_preemption_is_never_told_as_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unique prompts in a pool too small for them: what is computed anew after a preemption is no hit."""
    engine = make_engine(kv_blocks=8, max_model_len=128)
    skipped = _skipped(engine, monkeypatch)
    requests = [greedy_request(f"{i}", _prompt(i, 30), 60) for i in range(6)]
    deltas = finish_all(engine, requests)
    assert engine.preemptions > 0
    assert set(_told(deltas).values()) == {0} and _told(deltas) == skipped
    assert engine.load().prefix_hit_tokens == 0 < (engine.load().prefix_queried_tokens or 0)


def test_B112_what_is_told_as_cached_is_what_was_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the prompts share a prefix; some match and have to wait for room; some are preempted."""
    engine = make_engine(kv_blocks=12, max_model_len=160)
    skipped = _skipped(engine, monkeypatch)
    shared = _prompt(50, 48)
    refused = 0
    adopt = engine._scheduler.cache.adopt

    def counted(sequence: Any, matched: Any, spare_blocks: int = 0) -> bool:
        nonlocal refused
        adopted = adopt(sequence, matched, spare_blocks)
        refused += bool(matched) and not adopted
        return adopted

    monkeypatch.setattr(engine._scheduler.cache, "adopt", counted)
    told: dict[str, int] = {}
    for round_ in range(3):
        names = [f"{round_}.{number}" for number in range(6)]
        prompts = [(shared if number % 2 else ()) + _prompt(number, 40) for number in range(6)]
        requests = [
            greedy_request(name, (*prompt, round_), 50) for name, prompt in zip(names, prompts, strict=True)
        ]
        told |= _told(finish_all(engine, requests))
    assert engine.preemptions > 0 and refused > 10, (engine.preemptions, refused)
    assert told == skipped and sum(told.values()) > 0
    assert engine.load().prefix_hit_tokens == sum(skipped.values())


def test_B112_a_match_that_never_got_room_is_no_hit() -> None:
    engine = make_engine(kv_blocks=8, max_model_len=128)
    shared = _prompt(51, 48)
    finish_all(engine, [greedy_request("first", shared, 1)])
    engine.add(greedy_request("large", _prompt(52, 60), 20))
    engine.step()
    before = engine.load()
    engine.add(greedy_request("waits", shared + _prompt(53, 60), 1))
    for _ in range(5):
        engine.step()
    (waits,) = engine._scheduler.waiting
    assert len(engine._scheduler.cache.match(waits)) == 3, "and there is no room for the rest"
    assert engine.load().prefix_hit_tokens == before.prefix_hit_tokens
    assert engine.load().prefix_queried_tokens == before.prefix_queried_tokens
    engine.abort("waits")
    while engine.has_work:
        engine.step()
    assert engine.load().prefix_hit_tokens == before.prefix_hit_tokens


def test_B090_a_salt_separates_cached_prefixes() -> None:
    engine = make_engine()
    prompt = _prompt(3, 64)

    def cached(name: str, salt: str | None) -> int:
        request = replace(greedy_request(name, prompt, 1), salt=salt)
        return finish_all(engine, [request])[name][-1].cached_tokens

    assert [cached("a", None), cached("b", None)] == [0, 48]
    assert [cached("c", "x"), cached("d", "x"), cached("e", "y")] == [0, 48, 0]


def test_reset_forgets_the_cache_but_not_while_requests_run() -> None:
    engine = make_engine()
    request = greedy_request("a", _prompt(4, 64), 4)
    finish_all(engine, [request])
    engine.add(replace(request, request_id="b"))
    engine.step()
    assert not engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert engine.reset_prefix_cache()
    assert finish_all(engine, [request])["a"][-1].cached_tokens == 0


# Stops


def _reply(stops: StopRule, max_tokens: int = 40, sampling: Sampling | None = None) -> list[Delta]:
    request = Request("a", _prompt(6, 20), max_tokens, sampling or Sampling(temperature=0.0), stops)
    return finish_all(make_engine(), [request])["a"]


def test_a_reply_ends_at_max_tokens() -> None:
    deltas = _reply(StopRule())
    assert deltas[-1].finish_reason == "length" and deltas[-1].output_tokens == 40
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert all(delta.text for delta in deltas[:-1])


def test_a_reply_ends_at_an_end_token_which_is_not_in_its_text() -> None:
    free = token_ids(_reply(StopRule()))
    place = next(i for i in range(5, 40) if free[i] not in free[:i])
    for stops, reason in (
        (StopRule(end_ids=frozenset({free[place]})), None),
        (StopRule(stop_ids=frozenset({free[place]})), free[place]),
    ):
        deltas = _reply(stops)
        assert token_ids(deltas) == free[: place + 1]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", reason)
        assert text_of(deltas) == tiny().tokenizer.decode(free[:place])


def test_min_tokens_keeps_end_tokens_out() -> None:
    free = token_ids(_reply(StopRule()))
    deltas = _reply(StopRule(end_ids=frozenset({free[5]}), min_tokens=12), max_tokens=12)
    assert len(token_ids(deltas)) == 12 and free[5] not in token_ids(deltas)


def test_a_stop_string_over_token_borders_ends_the_text_before_it() -> None:
    whole = text_of(_reply(StopRule()))
    stop = whole[9:12]
    assert len(stop.encode()) == 3  # three tokens of one byte
    at = whole.find(stop)
    deltas = _reply(StopRule(stop_strings=(stop, "never")))
    assert text_of(deltas) == whole[:at]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert text_of(_reply(StopRule(stop_strings=(stop,), include_stop=True))) == whole[:at] + stop


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    whole = text_of(_reply(StopRule(), max_tokens=12))
    assert text_of(_reply(StopRule(stop_strings=(whole[-2:] + "\x00never",)), max_tokens=12)) == whole


# Sampling


def test_a_seed_gives_the_same_reply_alone_and_in_company() -> None:
    def request(name: str, seed: int) -> Request:
        return Request(name, _prompt(7, 40), 20, Sampling(temperature=1.5, seed=seed))

    alone = token_ids(finish_all(make_engine(), [request("a", 5)])["a"])
    company = [request(str(i), i) for i in range(6)] + [greedy_request("g", _prompt(8, 90), 30)]
    together = finish_all(make_engine(kv_blocks=24, max_model_len=256, max_batched_tokens=32), company)
    assert token_ids(together["5"]) == alone
    assert len({tuple(token_ids(together[str(i)])) for i in range(6)}) == 6


def test_the_engines_seed_decides_for_requests_without_one() -> None:
    def replies(seed: int) -> list[list[int]]:
        engine = Engine(tiny(), make_engine().limits, seed)
        requests = [Request(str(i), _prompt(7, 10), 12, Sampling(temperature=1.5)) for i in range(2)]
        deltas = finish_all(engine, requests)
        return [token_ids(deltas["0"]), token_ids(deltas["1"])]

    assert replies(1) == replies(1) != replies(2)
    assert replies(1)[0] != replies(1)[1]


# Failures


class _Faulty:
    """A runner that fails for every batch with a row that ``breaks`` says."""

    def __init__(self, runner: ModelRunner, breaks: Callable[[Work], bool]) -> None:
        self.runner = runner
        self.breaks = breaks

    def run(self, batch: Batch) -> tuple[tuple[Work, ...], torch.Tensor]:
        if any(self.breaks(row) for row in batch.rows):
            raise RuntimeError("injected")
        return self.runner.run(batch)


def _break(engine: Engine, breaks: Callable[[Work], bool]) -> None:
    engine._runner = _Faulty(engine._runner, breaks)  # type: ignore[assignment]


def test_a_request_that_breaks_the_model_fails_alone() -> None:
    engine = make_engine(max_batched_tokens=64)
    _break(engine, lambda row: row.sequence.request_id.startswith("bad") and row.start >= 24)
    good = [greedy_request(f"{i}", _prompt(i, 20), 30) for i in range(4)]
    bad = [greedy_request("bad-decode", _prompt(9, 20), 30), greedy_request("bad-prefill", _prompt(9, 90), 3)]
    deltas = finish_all(engine, [*good[:2], *bad, *good[2:]])
    for request in bad:
        assert deltas[request.request_id][-1].finish_reason == "error"
        assert "injected" in (deltas[request.request_id][-1].error or "")
    for request in good:
        assert token_ids(deltas[request.request_id]) == _alone(request)
    assert engine.load().kv_usage == 0.0


def test_an_engine_that_cannot_compute_anything_says_so() -> None:
    engine = make_engine()
    _break(engine, lambda row: True)
    engine.add(greedy_request("a", _prompt(1, 5), 3))
    engine.add(greedy_request("b", _prompt(2, 5), 3))
    assert {delta.request_id: delta.finish_reason for delta in engine.step()} == {"a": "error", "b": "error"}
    engine.add(greedy_request("c", _prompt(3, 5), 3))
    engine.step()
    engine.add(greedy_request("d", _prompt(4, 5), 3))
    with pytest.raises(EngineBroken, match="injected"):
        engine.step()


def test_nan_in_one_request_reaches_no_other() -> None:
    """Token 262 has a broken embedding; the blocks its request used are then used by others."""
    model = tiny()
    embedding = model.weights.embedding.clone()
    embedding[262] = float("nan")
    broken = replace(model, weights=replace(model.weights, embedding=embedding))
    engine = make_engine(broken, kv_blocks=8, max_model_len=128, max_batched_tokens=32)
    good = [greedy_request(f"{i}", _prompt(i, 21), 20) for i in range(3)]
    for turn in range(3):
        poison = greedy_request(f"bad{turn}", (*_prompt(50 + turn, 40), 262, 1, 2), 5)
        deltas = finish_all(engine, [poison, *good])
        assert deltas[poison.request_id][-1].finish_reason == "error"
        for request in good:
            assert token_ids(deltas[request.request_id]) == _alone(request)


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = make_engine(kv_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add(greedy_request("a", _prompt(1, 60), 5))
    assert not engine.has_work
    engine.check_invariants()
