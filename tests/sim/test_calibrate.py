"""``warmroute calibrate``: known costs come out over HTTP; a real replica is measured; faults are told."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from replica.contract.cost_fit import (
    NO_ATTENTION_TOKENS,
    DecodePoint,
    PrefillPoint,
    fit_decode,
    fit_prefill,
)
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.config import parse_config
from router.config_errors import ConfigError
from sim.calibrate.calibrate_command import fragment
from sim.calibrate.measure import CalibrationError, Measurements, MeasureSettings, batch_sizes, measure
from tests.replica.serving import replica
from tests.sim.commands import exit_code
from tests.sim.fake_engine_server import CountedClock, FakeEngineServer
from warmroute import main

PREFILL = PrefillCost(fixed_s=0.012, per_token_s=45e-6, attention_tokens=9_000.0)
DECODE = DecodeCost(fixed_s=0.007, per_sequence_s=90e-6)


def measured(
    change: Callable[[FakeEngineServer], None] = lambda server: None, **settings: Any
) -> tuple[Measurements, FakeEngineServer]:
    """What is measured of a fake engine with those costs."""

    async def scenario() -> tuple[Measurements, FakeEngineServer]:
        clock = CountedClock()
        server = FakeEngineServer(clock, PREFILL, DECODE)
        change(server)
        async with server.serving() as url:
            given = {
                "longest_tokens": 4_096,
                "repeats": 2,
                "most_sequences": 8,
                "output_tokens": 24,
                **settings,
            }
            made = MeasureSettings(url=url, model="fake", salt="test", **given)
            return await measure(made, clock=clock), server

    return asyncio.run(scenario())


def test_known_costs_come_out_over_http() -> None:
    made, server = measured()
    prefill, error = fit_prefill(made.prefill)
    assert prefill.fixed_s == pytest.approx(PREFILL.fixed_s, rel=1e-3)
    assert prefill.per_token_s == pytest.approx(PREFILL.per_token_s, rel=1e-3)
    assert prefill.attention_tokens == pytest.approx(PREFILL.attention_tokens, rel=1e-2)
    assert error.worst < 1e-3
    decode, error = fit_decode(made.decode)
    assert decode.fixed_s == pytest.approx(DECODE.fixed_s, rel=0.02)
    assert decode.per_sequence_s == pytest.approx(DECODE.per_sequence_s, rel=0.1)
    assert [point.sequences for point in made.decode] == [1, 2, 4, 8]
    assert not made.notes
    assert {point.position > 0 for point in made.prefill} == {True, False}
    assert all(body["ignore_eos"] and body["stream_options"] for body in server.requests)


@pytest.mark.parametrize(
    ("fault", "note"),
    [
        ("tells_cached", "does not tell cached_tokens"),
        ("caches", "reports no hit on a prefix just sent"),
    ],
)
def test_without_hits_the_cold_prompts_must_do(fault: str, note: str) -> None:
    made, _ = measured(lambda server: setattr(server, fault, False))
    assert [one for one in made.notes if note in one]
    assert all(point.position == 0 for point in made.prefill)
    prefill, _ = fit_prefill(made.prefill)
    assert prefill.attention_tokens == pytest.approx(PREFILL.attention_tokens, rel=0.02)


def test_a_server_that_takes_shorter_prompts() -> None:
    made, _ = measured(lambda server: setattr(server, "max_tokens", 1_500))
    assert "was refused" in made.notes[0]
    assert max(point.new_tokens + point.position for point in made.prefill) <= 1_500


def test_a_base_model_without_template_and_a_strict_server() -> None:
    def change(server: FakeEngineServer) -> None:
        server.has_template = False
        server.takes_ignore_eos = False

    made, server = measured(change)
    assert made.prefill
    assert all("prompt" in body for body in server.requests[2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tells_usage": False}, "tells no usage"),
        ({"max_tokens": 1}, "expected an OpenAI server that streams"),
        ({"most_sequences": 1}, "status 429"),
    ],
)
def test_servers_that_cannot_be_measured(change: dict[str, Any], message: str) -> None:
    def changed(server: FakeEngineServer) -> None:
        for name, value in change.items():
            setattr(server, name, value)

    with pytest.raises(CalibrationError, match=message):
        measured(changed)


def test_the_command_prints_a_config_that_the_router_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against our own replica with the tiny model, in real time."""
    monkeypatch.setenv("CALIBRATE_TEST_KEY", "sesame")
    arguments = ["--longest", "512", "--repeats", "1", "--most-sequences", "4", "--output-tokens", "12"]

    async def scenario() -> None:
        async with replica(kv_tokens=8_192) as running:
            command = ["calibrate", "--url", running.url, *arguments, "--api-key-env", "CALIBRATE_TEST_KEY"]
            assert await asyncio.to_thread(main, command) == 0
            said = capsys.readouterr().out
            assert "off by" in said
            assert "caution: --repeats 1: one disturbance is not told from a slow replica" in said
            config = parse_config(yaml.safe_load(said[said.index("replicas:") :]), "printed")
            (entry,) = config.replicas
            assert entry.url == running.url
            assert entry.cost is not None and entry.cost.prefill.seconds(1_000) > 0
            assert await asyncio.to_thread(main, [*command, "--json"]) == 0
            made = orjson.loads(capsys.readouterr().out)
            assert made["cost"].keys() == entry.cost.model_dump(exclude_unset=True).keys()
            assert any(point["cached_tokens"] for point in made["prefill"])
            assert made["cautions"]

    asyncio.run(scenario())


@pytest.mark.parametrize("arguments", [(), ("--longest", "512"), ("--model", "tiny")])
def test_no_prompt_is_longer_than_the_context(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """A token of the tiny model may be one character: four times what is aimed at, until that is known."""
    few = ["--repeats", "1", "--most-sequences", "2", "--output-tokens", "12"]

    async def scenario() -> None:
        async with replica(kv_tokens=1_024) as running:
            command = ["calibrate", "--url", running.url, *few, *arguments]
            assert await asyncio.to_thread(main, command) == 0, capsys.readouterr().err
            assert "refused" not in capsys.readouterr().out

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--url", "nowhere"), 2, "http://HOST:PORT"),
        (("--url", "http://127.0.0.1:1"), 1, "cannot be reached"),
        (("--url", "http://127.0.0.1:1", "--model", "m"), 1, "cannot be reached: Connection refused"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, expected: str
) -> None:
    assert exit_code(["calibrate", *arguments]) == code
    assert expected in capsys.readouterr().err


def test_a_key_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--url", "http://a:1", "--api-key-env", "NO_SUCH_VARIABLE"])
    assert ended.value.code == 2 and "NO_SUCH_VARIABLE" in capsys.readouterr().err


COSTS = st.builds(
    PrefillCost,
    fixed_s=st.floats(0, 0.1),
    per_token_s=st.floats(1e-6, 1e-3),
    attention_tokens=st.floats(1e3, 1e6),
)


@given(COSTS, st.integers(0, 1_000))
def test_a_fit_to_noisy_times_predicts_within_the_noise(true: PrefillCost, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(64, 0), (256, 0), (1_024, 0), (4_096, 0), (16_384, 0), (1_024, 8_192), (4_096, 8_192)]
    points = [PrefillPoint(m, h, true.seconds(m, h) * rng.uniform(0.98, 1.02)) for m, h in sizes]
    cost, error = fit_prefill(points)
    assert min(cost.fixed_s, cost.per_token_s, cost.attention_tokens) >= 0.0
    assert error.worst < 0.05
    for tokens in (100, 2_000, 12_000):
        assert cost.seconds(tokens, 0) == pytest.approx(true.seconds(tokens, 0), rel=0.15)


def test_a_fit_needs_two_lengths_and_a_step() -> None:
    with pytest.raises(ValueError, match="at least two lengths"):
        fit_prefill([PrefillPoint(10, 0, 0.1), PrefillPoint(10, 5, 0.1)])
    quadratic = [PrefillPoint(tokens, 0, 1e-6 * tokens**2) for tokens in (100, 200, 400)]
    noise, _ = fit_prefill(quadratic)
    assert noise.per_token_s > 1e-5 and noise.attention_tokens == NO_ATTENTION_TOKENS
    with pytest.raises(ValueError, match="no decode step"):
        fit_decode([])
    decode, _ = fit_decode([DecodePoint(1, 0.01)])
    assert decode == DecodeCost(0.01, 0.0)


@given(st.integers(1, 500))
def test_batches_rise_to_the_largest(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)


@given(COSTS)
def test_every_fragment_is_a_valid_config(cost: PrefillCost) -> None:
    config = parse_config(yaml.safe_load(fragment("http://a:1", cost, DECODE)), "fragment")
    read = config.replicas[0].cost
    assert read is not None
    assert read.prefill.seconds(1_000, 500) == pytest.approx(cost.seconds(1_000, 500), rel=2e-3)


def test_costs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cost.prefill_us_per_token"):
        parse_config({"replicas": [{"url": "http://a:1"}], "cost": {"prefill_us_per_token": 0}}, "test")
    with pytest.raises(ConfigError, match="decoding takes time"):
        zero = {"decode_step_ms": 0, "decode_us_per_sequence": 0}
        parse_config({"replicas": [{"url": "http://a:1", "cost": zero}]}, "test")
