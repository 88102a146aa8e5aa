"""Recurrent layers in the engine: the formula, restarts from checkpoints, failed steps, /metrics."""

import asyncio
from dataclasses import replace

import aiohttp
import pytest
import torch

from replica.batch import Batch
from replica.engine_limits import TierLimits
from replica.kv_cache.state_checkpoints import CopyState, ZeroState
from replica.model.decoder import Decoder
from replica.model.linear_attention import DECAY_SOFTNESS, LinearAttention, StateMemory
from replica.model.step_plan import StateSpan
from replica.model.tiny import RandomWeights, tiny_hybrid_shape
from replica.model.weights import assemble
from replica.server.app import ConfigError
from tests.replica.models import finish_all, greedy_request, make_engine, random_model, token_ids
from tests.replica.serving import post, replica

SHAPE = tiny_hybrid_shape()
LAYER = 1


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(tokens, SHAPE.heads, SHAPE.head_dim, generator=generator),
        torch.randn(tokens, 2 * SHAPE.kv_heads, SHAPE.head_dim, generator=generator),
        torch.randn(tokens, SHAPE.kv_heads, generator=generator),
    )


def _by_definition(queries: torch.Tensor, kv: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Each token's output as the sum over all tokens before it, in double precision."""
    keys, values = kv.double().chunk(2, 1)
    kept = torch.sigmoid(decays.double()) ** (1 / DECAY_SOFTNESS)
    rows = []
    for at in range(queries.shape[0]):
        heads = []
        for head in range(SHAPE.heads):
            group = head * SHAPE.kv_heads // SHAPE.heads
            total = torch.zeros(SHAPE.head_dim, dtype=torch.float64)
            for before in range(at + 1):
                share = kept[before + 1 : at + 1, group].prod() * (
                    queries[at, head].double() @ keys[before, group]
                )
                total += share * values[before, group]
            heads.append(total / (total.square().mean() + SHAPE.norm_eps).sqrt())
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("cuts", [(20,), (7, 13, 20), (1, 2, 3, 20)])
def test_states_give_what_the_definition_says_however_a_prompt_is_cut(cuts: tuple[int, ...]) -> None:
    queries, kv, decays = _inputs(20)
    memory = StateMemory(SHAPE, 2)
    got = torch.empty(20, SHAPE.heads * SHAPE.head_dim)
    begin = 0
    for end in cuts:
        part = slice(begin, end)
        step = LinearAttention((StateSpan(0, end - begin, 1),), memory, SHAPE.norm_eps)
        step(LAYER, queries[part], kv[part], decays[part], got[part])
        memory.finish_step(succeeded=True)
        begin = end
    torch.testing.assert_close(got.double(), _by_definition(queries, kv, decays), atol=1e-4, rtol=0)


def test_rows_of_one_step_do_not_meet_and_a_failed_step_leaves_no_trace() -> None:
    queries, kv, decays = _inputs(12)
    memory = StateMemory(SHAPE, 4)
    alone, beside = torch.empty(12, 64), torch.empty(12, 64)
    for first, stop, slot in ((0, 1, 0), (1, 9, 1), (9, 12, 2)):
        step = LinearAttention((StateSpan(0, stop - first, slot),), memory, SHAPE.norm_eps)
        step(LAYER, queries[first:stop], kv[first:stop], decays[first:stop], alone[first:stop])
        memory.finish_step(succeeded=False)
    assert not memory.read(LAYER, torch.arange(4)).any(), "nothing was kept"
    spans = (StateSpan(0, 1, 0), StateSpan(1, 9, 1), StateSpan(9, 12, 2))
    LinearAttention(spans, memory, SHAPE.norm_eps)(LAYER, queries, kv, decays, beside)
    memory.finish_step(succeeded=True)
    assert torch.equal(alone, beside)
    memory.carry_out([CopyState(1, 3), ZeroState(1)])
    states = memory.read(LAYER, torch.arange(4))
    assert states[3].any() and not states[1].any() and states[0].any()


@pytest.mark.parametrize("layer", [1, 2])
def test_hybrid_cached_and_chunked_replies_are_those_of_a_fresh_engine(layer: int) -> None:
    """Also where the last layer is the recurrent one, which all tokens must go through."""
    shape = replace(SHAPE, recurrent=frozenset((layer,)))
    weights = assemble(RandomWeights(shape, 0), shape, torch.float32)
    model = replace(random_model("tiny-hybrid"), shape=shape, weights=weights)
    prompt = [(31 * at + at // 3) % 256 for at in range(120)]
    wanted = token_ids(
        finish_all(make_engine(model, prefix_caching=False), [greedy_request("a", prompt, 20)])["a"]
    )
    for chunk in (None, 7, 33):
        engine = make_engine(model, max_chunk_tokens=chunk)
        for name, cached in (("cold", 0), ("warm", 112)):
            deltas = finish_all(engine, [greedy_request(name, prompt, 20)])[name]
            assert token_ids(deltas) == wanted and deltas[-1].cached_tokens == cached
        answered = [*prompt, *wanted, 5, 6, 7]
        deltas = finish_all(engine, [greedy_request("turn 2", answered, 1)])["turn 2"]
        assert deltas[-1].cached_tokens == 128, "the newest boundary of the reply: 139 tokens were computed"


def test_a_step_that_fails_once_is_run_again_from_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("tiny-hybrid")
    prompts = {name: [(at * step) % 256 for at in range(40)] for name, step in (("a", 3), ("b", 7))}
    asked = [greedy_request(name, prompt, 12) for name, prompt in prompts.items()]
    wanted = {name: token_ids(deltas) for name, deltas in finish_all(make_engine(model), asked).items()}
    forward, calls = Decoder.forward, 0

    def failing(self: Decoder, plan):
        nonlocal calls
        calls += 1
        logits, finite = forward(self, plan)
        return logits, finite and calls % 4 != 3  # after all layers have advanced

    monkeypatch.setattr(Decoder, "forward", failing)
    engine = make_engine(model)
    got = finish_all(engine, [replace(request, request_id=f"{request.request_id}2") for request in asked])
    assert calls > 12
    for name, tokens in wanted.items():
        told = token_ids(got[f"{name}2"])
        assert told == tokens[: len(told)] and (len(told) == 12 or got[f"{name}2"][-1].error)
    assert any(not deltas[-1].error for deltas in got.values())
    assert engine.states is not None and engine.states.inventory().live == 0


def test_an_empty_batch_needs_no_states() -> None:
    engine = make_engine(random_model("tiny-hybrid"))
    assert engine.step() == [] and Batch((), 0, 0, 0).empty


def test_metrics_tell_the_inventory_of_states() -> None:
    async def run() -> None:
        async with replica(model="tiny-hybrid", state_slots=6) as running:
            body = {"model": "tiny-hybrid", "prompt": list(range(60)), "max_tokens": 3, "temperature": 0}
            for cached in (0, 48):
                _, answer = await post(running.url + "/v1/completions", body)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            async with aiohttp.ClientSession() as session, session.get(running.url + "/metrics") as page:
                lines = (await page.text()).splitlines()
        told = {
            line.rsplit(" ", 1)[0].split('use="')[1]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("warmroute:state_slots{")
        }
        assert {use.split('"')[0]: value for use, value in told.items()} == {
            "live": 0,
            "checkpoints": 1,
            "free": 5,
        }
        outcomes = [line for line in lines if line.startswith("warmroute:state_checkpoints_total{")]
        assert any('outcome="restored"' in line and line.endswith(" 1.0") for line in outcomes)
        assert any('outcome="not_exact"' in line and line.endswith(" 0.0") for line in outcomes)

    asyncio.run(run())


def test_tiers_below_a_hybrid_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recurrent layers.*remove tiers"):
        make_engine(random_model("tiny-hybrid"), tiers=TierLimits(1 << 20))

    async def run() -> None:
        with pytest.raises(ConfigError, match="recurrent layers"):
            async with replica(model="tiny-hybrid", tiers={"host_mib": 1}):
                pass

    asyncio.run(run())
