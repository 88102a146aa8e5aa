"""Step-time models."""

from math import ceil

import numpy as np
import pytest

from replica.batch import Batch, Work
from replica.sequence import Sequence
from sim.step_time.linear import LinearStepTime
from sim.step_time.presets import PRESET_BATCHED_TOKENS, PRESETS
from sim.step_time.step_time import cold_prefill_s

LLM_D_H200 = {2_048: 0.078, 8_192: 0.250, 16_384: 0.510, 32_768: 1.173, 49_152: 1.988}
"""Prompt tokens -> seconds of prefill, gpt-oss-120b on one H200, published by llm-d (2026)."""


def test_the_measured_preset_is_the_least_squares_fit_it_says() -> None:
    preset, step_tokens = PRESETS["h200-gpt-oss-120b"], PRESET_BATCHED_TOKENS["h200-gpt-oss-120b"]
    rows = [[ceil(n / step_tokens) / t, n / t, n * n / t] for n, t in LLM_D_H200.items()]
    (fixed_s, per_token_s, squared_s), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    assert preset.step_s + preset.prefill_step_s == pytest.approx(fixed_s, rel=0.002)
    assert preset.prefill_token_s == pytest.approx(per_token_s, rel=0.002)
    assert preset.attention_tokens == pytest.approx(per_token_s / (2 * squared_s), rel=0.002)
    for prompt_tokens, seconds in LLM_D_H200.items():
        assert cold_prefill_s(preset, prompt_tokens, step_tokens) == pytest.approx(seconds, rel=0.003)


def test_the_emulated_replica_costs_what_it_costs_over_http() -> None:
    """base 8 ms + 60 µs a decode + 62.5 µs a prefill token, doubled at 64,000 tokens."""
    rows = [
        Work(Sequence("a", (), 1), 900, 1, True),
        Work(Sequence("b", (), 1), 100, 1, True),
        Work(Sequence("c", (), 1), 3_000, 2_000, False),
        Work(Sequence("d", (), 1), 0, 500, True),
    ]
    expected = 0.008 + 2 * 60e-6
    for start, count in ((3_000, 2_000), (0, 500)):
        expected += count * 62.5e-6 * (1 + (start + count / 2) / 64_000)
    assert PRESETS["emufleet"].seconds(Batch(rows, 2, 1_002, 2_500)) == pytest.approx(expected)


def test_reading_context_costs_what_is_said() -> None:
    model = LinearStepTime(0.01, 0.001, 0.0, decode_context_token_s=1e-6)
    assert model.seconds(Batch((), 3, 50_000, 0)) == pytest.approx(0.01 + 0.003 + 0.05)


def test_cold_prefill_in_chunks_attends_to_the_chunks_before() -> None:
    model = LinearStepTime(0.0, 0.0, 1e-3, attention_tokens=1_000.0)
    whole = cold_prefill_s(model, 1_000, 10_000)
    assert whole == pytest.approx(1.5)
    assert cold_prefill_s(model, 1_000, 100) == pytest.approx(whole)
