"""The model and the GPU that a plan names, or spells out by their sizes."""

from replica.contract.roofline.gpus import GPUS, Gpu
from replica.contract.roofline.model_shape import Experts, ModelShape, RecurrentState
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from sim.plan.replica_config import GpuSizes, ModelSizes, RooflineReplica


def model_shape(replica: RooflineReplica) -> ModelShape:
    """The shape the plan names or spells out."""
    if isinstance(replica.model, str):
        return MODEL_SHAPES[replica.model]
    return _own_shape(replica.model)


def gpu(replica: RooflineReplica) -> Gpu:
    """The GPU the plan names or spells out."""
    if isinstance(replica.gpu, str):
        return GPUS[replica.gpu]
    return _own_gpu(replica.gpu)


def _own_shape(sizes: ModelSizes) -> ModelShape:
    return ModelShape(
        name=sizes.name,
        source="plan",
        layers=sizes.layers,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        ffn=sizes.ffn,
        vocab=sizes.vocab,
        tied_embeddings=sizes.tied_embeddings,
        experts=None if sizes.experts is None else Experts(**sizes.experts.model_dump()),
        windowed_layers=sizes.windowed_layers,
        window_tokens=sizes.window_tokens,
        state=None if sizes.state is None else RecurrentState(**sizes.state.model_dump()),
    )


def _own_gpu(sizes: GpuSizes) -> Gpu:
    math = {"bf16": sizes.bf16_tflops, "fp8": sizes.fp8_tflops, "int8": sizes.int8_tops}
    return Gpu(
        name=sizes.name,
        math_per_s={kind: value * 1e12 for kind, value in math.items() if value is not None},
        memory_bytes_per_s=sizes.memory_gb_per_s * 1e9,
        memory_bytes=sizes.memory_gb * 1e9,
        pcie_bytes_per_s=sizes.pcie_gb_per_s * 1e9,
        source="plan",
        nvlink_bytes_per_s=None if sizes.nvlink_gb_per_s is None else sizes.nvlink_gb_per_s * 1e9,
    )
