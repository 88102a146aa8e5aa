"""A replica by arithmetic against the simulator's roofline, and against what vLLM really had room for."""

from typing import Any

import pytest

from replica.batch import Batch
from sim.plan.plan_error import PlanError
from sim.plan.plan_file import PlanError as SamePlanError
from sim.plan.replica_config import MeasuredReplica, RooflineReplica
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import write_replica
from sim.plan.worksheet import Report, Worksheet
from sim.step_time.step_time import cold_prefill_s

DENSE = (
    ("llama-3.1-8b", "rtx-4090", 1, "bf16"),
    ("llama-3.1-8b", "h100", 1, "fp8"),
    ("llama-3.1-70b", "h100", 8, "bf16"),
    ("llama-3.1-70b", "h200", 2, "int4"),
    ("bamba-9b", "a100-80g", 1, "bf16"),
)


def written(**keys: Any) -> tuple[ReplicaCost, Report]:
    sheet = Worksheet("test", "a replica")
    sheet.section("One replica")
    cost = write_replica(sheet, RooflineReplica(kind="roofline", **keys))
    return cost, sheet.done()


@pytest.mark.parametrize(("model", "gpu", "gpus", "precision"), DENSE)
def test_the_closed_form_is_the_simulators_roofline(model: str, gpu: str, gpus: int, precision: str) -> None:
    cost, _ = written(model=model, gpu=gpu, gpus=gpus, precision=precision)
    step_time = cost.step_time()
    for tokens in (1_000, 8_192):
        assert cost.prefill_ms(tokens) / 1e3 == pytest.approx(
            cold_prefill_s(step_time, tokens, cost.max_batched_tokens), rel=0.02
        )
    for sequences in (1, 8, 32):
        context_us = 4_000 * cost.context_ns / 1e3
        decode_ms = cost.step_ms + sequences * (cost.sequence_us + context_us) / 1e3
        assert decode_ms / 1e3 == pytest.approx(
            step_time.seconds(Batch((), sequences, 4_000 * sequences, 0)), rel=0.02
        )


def test_a_mixture_of_experts_is_near_the_roofline_in_a_full_step() -> None:
    cost, _ = written(model="gpt-oss-120b", gpu="h200", precision="mxfp4")
    decode_ms = cost.step_ms + 64 * (cost.sequence_us + 4_000 * cost.context_ns / 1e3) / 1e3
    assert decode_ms / 1e3 == pytest.approx(cost.step_time().seconds(Batch((), 64, 64 * 4_000, 0)), rel=0.05)


def test_room_for_kv_is_what_vllm_had() -> None:
    # vllm_measured/RTX4090_Llama-3.1-8B/meta.json: num_kv_tokens 41,408 at gpu_memory_utilization 0.9.
    cost, _ = written(model="llama-3.1-8b", gpu="rtx-4090")
    assert cost.kv_tokens == pytest.approx(41_408, rel=0.01)


@pytest.mark.parametrize(
    ("model", "gpus", "kv_bytes"),
    [
        ("llama-3.1-8b", 1, 131_072),
        ("llama-3.1-70b", 4, 327_680),
        ("llama-3.1-70b", 16, 655_360),  # 8 KV heads on 16 GPUs: two copies
        ("deepseek-v3", 8, 8 * 70_272),  # a latent vector is not split
        ("gpt-oss-120b", 1, 36_864),
    ],
)
def test_kv_bytes_per_token(model: str, gpus: int, kv_bytes: int) -> None:
    precision = "fp8" if model == "deepseek-v3" else "mxfp4"
    gpu = "h200" if model == "deepseek-v3" else "h100"
    assert written(model=model, gpu=gpu, gpus=gpus, precision=precision)[0].kv_bytes == kv_bytes


def test_a_model_by_its_sizes_is_the_model_of_that_name() -> None:
    sizes = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "ffn": 14336, "vocab": 128256,
    }  # fmt: skip
    own = {"bf16_tflops": 100, "memory_gb_per_s": 1000, "memory_gb": 40}
    by_name, _ = written(model="llama-3.1-8b", gpu=own)
    by_sizes, _ = written(model=sizes, gpu=own)
    assert by_sizes.prefill_ms(5_000) == by_name.prefill_ms(5_000)
    assert by_sizes.kv_tokens == by_name.kv_tokens


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model": "llama-3.1-70b", "gpu": "h100"},
            "llama-3.1-70b does not fit: 141.1 GB of weights in bf16",
        ),
        ({"model": "llama-3.1-8b", "gpu": "a100-80g", "precision": "fp8"}, "a100-80g has no fp8 math"),
    ],
)
def test_what_cannot_run_is_refused(keys: dict[str, Any], message: str) -> None:
    assert PlanError is SamePlanError
    with pytest.raises(PlanError, match=message):
        written(**keys)


def test_a_short_prefill_takes_a_step() -> None:
    cost, _ = written(model="llama-3.1-8b", gpu="h100")
    assert cost.prefill_ms(1) == cost.step_ms
    assert cost.prefill_ms(4_000, 60_000) > 2 * cost.prefill_ms(4_000)


def test_a_measured_replica_is_taken_as_it_is() -> None:
    sheet = Worksheet("test", "a replica")
    sheet.section("One replica")
    measured = MeasuredReplica(
        kind="measured", prefill_us_per_token=31, prefill_fixed_ms=4, attention_tokens=64_000
    )
    cost = write_replica(sheet, measured)
    assert cost.prefill_ms(400, 2_900) == pytest.approx(4 + 400 * 0.031 * (1 + 3_100 / 64_000))
