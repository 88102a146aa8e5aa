"""The roofline against arithmetic by hand, and the search that fits it."""

from dataclasses import replace
from math import inf

import pytest

from replica.batch import Batch, Work
from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from replica.sequence import Sequence
from sim.step_time.simplex import minimize

PEAK = Efficiency(
    math=1.0, expert_math=1.0, attention_math=1.0, bandwidth=1.0, kv_bandwidth=1.0, step_s=0.0, sequence_s=0.0
)
H100_READS = GPUS["h100"].read_bytes_per_s


def prefill(*chunks: tuple[int, int]) -> Batch:
    """Chunks of (start, count), the last position of each sampled."""
    rows = [Work(Sequence("x", (), 1), start, count, True) for start, count in chunks]
    return Batch(rows, 0, 0, sum(count for _, count in chunks))


def test_a_decode_step_reads_the_weights_once_and_each_context_once() -> None:
    model = RooflineStepTime.of("llama-3.1-8b", "h100", efficiency=PEAK)
    weights = 2 * (MODEL_SHAPES["llama-3.1-8b"].linear_weights + 128_256 * 4_096)
    bandwidth = H100_READS
    alone = model.seconds(Batch((), 1, 0, 0))
    assert alone == pytest.approx(weights / bandwidth, rel=1e-3)
    with_context = model.seconds(Batch((), 8, 80_000, 0)) - model.seconds(Batch((), 8, 0, 0))
    assert with_context == pytest.approx(80_000 * 131_072 / bandwidth)


def test_prefill_is_bound_by_math_and_quadratic_in_its_length() -> None:
    model = RooflineStepTime.of("llama-3.1-70b", "h100", tensor_parallel=8, efficiency=PEAK)
    one, two = model.seconds(prefill((0, 16_000))), model.seconds(prefill((0, 32_000)))
    assert 2.0 < two / one < 4.0
    shape = MODEL_SHAPES["llama-3.1-70b"]
    math = 8 * 989.4e12 * GPUS["h100"].matmul_share
    least = (16_000 * shape.flops_per_token + shape.attention_flops(8_000) * 16_000) / math
    assert least < one < 1.8 * least  # links, activations and the output layer on top


def test_attention_at_a_position_costs_what_it_attends_to() -> None:
    model = RooflineStepTime.of("llama-3.1-8b", "h100")
    assert model.seconds(prefill((30_000, 1_000))) > model.seconds(prefill((0, 1_000)))


def test_a_mixed_step_costs_both() -> None:
    model = RooflineStepTime.of("llama-3.1-8b", "h100")
    chunk = prefill((0, 2_000)).rows[0]
    mixed = model.seconds(Batch((chunk,), 0, 0, 2_000))
    rows = [Work(Sequence(str(k), (), 1), 999, 1, True) for k in range(32)]
    both = model.seconds(Batch([*rows, chunk], 32, 32_000, 2_000))
    assert both > mixed + 32_000 * 131_072 / H100_READS


def test_precisions_change_what_they_should() -> None:
    bf16, fp8, int4 = (
        RooflineStepTime.of("llama-3.1-8b", "h100", precision, efficiency=PEAK)
        for precision in ("bf16", "fp8", "int4")
    )
    decode, long = Batch((), 1, 0, 0), prefill((0, 16_000))
    output_s = 2 * 128_256 * 4_096 / H100_READS
    linear_s = bf16.seconds(decode) - output_s
    assert fp8.seconds(decode) - output_s == pytest.approx(linear_s / 2, rel=0.01)
    assert int4.seconds(decode) - output_s == pytest.approx(linear_s * 4.125 / 16, rel=0.01)
    assert int4.seconds(long) == pytest.approx(bf16.seconds(long), rel=1e-3)  # math stays at 16 bits
    assert fp8.seconds(long) < 0.75 * bf16.seconds(long)


def test_tensor_parallel_divides_the_work_and_adds_the_links() -> None:
    one, eight = (
        RooflineStepTime.of("llama-3.1-8b", "h100", tensor_parallel=count, efficiency=PEAK)
        for count in (1, 8)
    )
    latency_s = 2 * 32 * PEAK.all_reduce_s
    step = Batch((), 4, 4_000, 0)
    assert eight.seconds(step) == pytest.approx(one.seconds(step) / 8 + latency_s, rel=0.02)


def test_a_mixture_reads_the_experts_it_touches_and_multiplies_the_active_ones() -> None:
    model = RooflineStepTime.of("mixtral-8x7b", "h100", efficiency=PEAK)
    shape, gpu = model.shape, model.gpu
    assert shape.experts is not None
    all_s = 2 * shape.expert_weights / gpu.read_bytes_per_s
    assert model.experts_s(1) == pytest.approx(all_s * 2 / 8, rel=1e-3)  # one token: its two experts
    assert model.experts_s(2) == pytest.approx(all_s * (1 - 0.75**2), rel=1e-3)
    assert model.experts_s(40) == pytest.approx(all_s, rel=0.02)  # all of them, once
    tokens = 100_000
    math_s = 2 * shape.expert_weights * 2 / 8 * tokens / (gpu.math_per_s["bf16"] * gpu.matmul_share)
    assert model.experts_s(tokens) == pytest.approx(math_s, rel=0.01)
    halves = RooflineStepTime.of("mixtral-8x7b", "h100", tensor_parallel=2, efficiency=PEAK)
    assert halves.experts_s(40) == pytest.approx(model.experts_s(40) / 2)
    assert RooflineStepTime.of("llama-3.1-8b", "h100").experts_s(1_000) == 0.0


def test_windows_and_states_do_not_grow_with_the_context() -> None:
    model = RooflineStepTime.of("gpt-oss-120b", "h200", "mxfp4", efficiency=PEAK)
    near = model.seconds(Batch((), 1, 20_000, 0)) - model.seconds(Batch((), 1, 10_000, 0))
    assert near == pytest.approx(10_000 * 18 * 2 * 8 * 64 * 2 / GPUS["h200"].read_bytes_per_s)
    hybrid = RooflineStepTime.of("bamba-9b", "h100", efficiency=PEAK)
    shape = hybrid.shape
    assert hybrid.seconds(Batch((), 2, 0, 0)) - hybrid.seconds(Batch((), 1, 0, 0)) == pytest.approx(
        shape.state_bytes / H100_READS,
        rel=0.1,  # and its activations
    )


def test_room_for_kv() -> None:
    measured = 41_408  # vLLM's own count on this card (sim/fidelity/data)
    room = RooflineStepTime.of("llama-3.1-8b", "rtx-4090").kv_capacity_tokens(activation_bytes=1.5e9)
    assert room == pytest.approx(measured, rel=0.2)
    with pytest.raises(ValueError, match="in bf16 does not fit 1 x h100"):
        RooflineStepTime.of("llama-3.1-70b", "h100").kv_capacity_tokens()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-4", "h100", "bf16"), "model 'llama-4' is unknown; expected one of smollm2-135m"),
        (("llama-3.1-8b", "h900", "bf16"), "GPU 'h900' is unknown"),
        (("llama-3.1-8b", "h100", "int3"), "precision 'int3' is unknown"),
        (("llama-3.1-8b", "a100-80g", "fp8"), "a100-80g has no fp8 math"),
    ],
)
def test_names_that_do_not_fit_are_refused(arguments: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RooflineStepTime.of(*arguments)


def test_every_gpu_prices_every_model() -> None:
    for gpu in GPUS:
        for model in MODEL_SHAPES:
            step = RooflineStepTime.of(model, gpu)
            decode, more = step.seconds(Batch((), 4, 4_000, 0)), step.seconds(Batch((), 8, 8_000, 0))
            assert 0 < decode < more < inf


def test_the_search_finds_the_least_of_a_narrow_valley() -> None:
    def rosenbrock(point: tuple[float, ...]) -> float:
        x, y = point
        return 100.0 * (y - x * x) ** 2 + (1.0 - x) ** 2 + 1.0

    point, least = minimize(rosenbrock, [0.3, 2.0], tolerance=1e-9, evaluations=2_000)
    assert point == pytest.approx((1.0, 1.0), rel=0.02)
    assert least == pytest.approx(1.0, abs=1e-3)


def test_slower_parts_make_slower_steps() -> None:
    model = RooflineStepTime.of("llama-3.1-8b", "l4")
    batch = Batch((prefill((0, 500)).rows[0],), 0, 0, 500)
    for name, value in (("math", 0.4), ("step_s", 0.01), ("sequence_s", 0.01), ("bandwidth", 0.4)):
        slower = replace(model, efficiency=replace(model.efficiency, **{name: value}))
        assert slower.seconds(batch) > model.seconds(batch), name
