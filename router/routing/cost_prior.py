"""What a replica's work should cost until it has shown it: from its model and GPU, as far as they are known.

The operator may name the GPU (``cost.gpu``); the model's name comes from the config or from ``/v1/models``.
Without a GPU it is guessed from the KV capacity the engine tells: of the GPUs, counts and precisions whose
memory would leave about that much room beside the model's weights, all are taken, and costs between theirs
(their geometric mean). The costs are the roofline's (``replica/contract/roofline``).
"""

from dataclasses import dataclass
from math import exp, log

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from replica.contract.roofline.first_cost import first_cost
from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_names import named_model
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.roofline import RooflineStepTime

CAPACITY_OFF = 0.06
"""A GPU may be the one if it would leave room for so much more or less KV than is told, as a share."""
GPU_COUNTS = (1, 2, 4, 8)
USUAL_MEMORY_SHARE = 0.9
"""vLLM's default for ``gpu_memory_utilization``."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the operator says of what a replica runs on; ``None`` is "find out"."""

    gpu: str | None = None
    gpus: int = 1
    precision: str | None = None
    model: str | None = None
    """A key of the known shapes, or a name that stands for one."""


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Costs and where they come from, in words."""

    prefill: PrefillCost
    decode: DecodeCost
    source: str


def cost_prior(
    hardware: Hardware,
    served_model: str | None,
    capacity_tokens: int | None = None,
    memory_share: float | None = None,
) -> CostPrior | None:
    """The prior for a replica that serves ``served_model``; ``None`` where nothing can be said.

    ``memory_share`` of each GPU is the engine's (``gpu_memory_utilization``).

    >>> named = cost_prior(Hardware(gpu="h100"), "meta-llama/Llama-3.1-8B-Instruct")
    >>> named.source, round(1e3 * named.prefill.seconds(4_096))
    ('llama-3.1-8b in bf16 on 1 x h100', 99)
    >>> cost_prior(Hardware(), "meta-llama/Llama-3.1-8B-Instruct", capacity_tokens=439_000).source
    'guess from 439,000 KV tokens: llama-3.1-8b in bf16 on 1 x a100-80g, 1 x h100, 1 x h100-pcie'
    >>> cost_prior(Hardware(), "my-own-model", capacity_tokens=439_000) is None
    True
    """
    found = named_model(hardware.model or served_model or "")
    if found is None:
        return None
    model, precision = found
    precision = hardware.precision or precision
    if hardware.gpu is not None:
        gpu, count = hardware.gpu, hardware.gpus
        if not _possible(model, gpu, precision):
            return None
        roofline = RooflineStepTime.of(model, gpu, precision, tensor_parallel=count)
        return CostPrior(*first_cost(roofline), f"{model} in {precision} on {count} x {gpu}")
    if capacity_tokens is None or not MODEL_SHAPES[model].kv_bytes_per_token():
        return None
    share = memory_share or USUAL_MEMORY_SHARE
    alike = [
        roofline
        for gpu in GPUS
        for count in GPU_COUNTS
        if _possible(model, gpu, precision)
        for roofline in (RooflineStepTime.of(model, gpu, precision, tensor_parallel=count),)
        if _holds(roofline, capacity_tokens, share)
    ]
    if not alike:
        return None
    names = ", ".join(f"{one.tensor_parallel} x {one.gpu.name}" for one in alike)
    source = f"guess from {capacity_tokens:,} KV tokens: {model} in {precision} on {names}"
    costs = [first_cost(roofline) for roofline in alike]
    return CostPrior(
        PrefillCost(
            _mean([prefill.fixed_s for prefill, _ in costs]),
            _mean([prefill.per_token_s for prefill, _ in costs]),
            _mean([prefill.attention_tokens for prefill, _ in costs]),
        ),
        DecodeCost(
            _mean([decode.fixed_s for _, decode in costs]),
            _mean([decode.per_sequence_s for _, decode in costs]),
        ),
        source,
    )


def _possible(model: str, gpu: str, precision: str) -> bool:
    """The GPU can multiply in that precision."""
    try:
        RooflineStepTime.of(model, gpu, precision)
    except ValueError:
        return False
    return True


def _holds(roofline: RooflineStepTime, capacity_tokens: int, memory_share: float) -> bool:
    try:
        room = roofline.kv_capacity_tokens(memory_share)
    except ValueError:
        return False  # not even the weights
    return abs(capacity_tokens / room - 1.0) <= CAPACITY_OFF


def _mean(values: list[float]) -> float:
    """Geometric; 0 where one is."""
    return exp(sum(map(log, values)) / len(values)) if all(value > 0.0 for value in values) else 0.0
