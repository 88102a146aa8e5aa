"""What a plan's YAML says of a replica: model and GPUs by name or by their sizes, or what was measured.

Defaults about hardware are those that the simulator's roofline was fitted with; a plan prints them as such.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.contract.roofline.roofline import Efficiency

_FITTED = Efficiency()

Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e6)]
"""Requests a second; Erlang's formula is computed replica by replica."""


class PlanSection(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def one_of(what: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is known; raises ValueError with the names that are."""
    names = sorted(known)
    if name not in names:
        raise ValueError(f"unknown {what}; expected one of {', '.join(names)}")
    return name


def _known(what: str, table: Iterable[str]) -> Any:
    def check(value: str) -> str:
        return one_of(what, value, table)

    return check


class ExpertSizes(PlanSection):
    """A mixture of experts."""

    count: PositiveInt
    active: PositiveInt
    ffn: PositiveInt
    shared_ffn: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0


class StateSizes(PlanSection):
    """Layers with a recurrent state."""

    layers: PositiveInt
    heads: PositiveInt
    key_dim: PositiveInt
    value_dim: PositiveInt
    conv_channels: NonNegativeInt = 0
    conv_kernel: PositiveInt = 4
    projections: PositiveInt
    """Weights of one such layer's projections."""
    state_bits: Literal[16, 32] = 32
    conv_bits: Literal[16, 32] = 16


class ModelSizes(PlanSection):
    """A model that is not in the table: the sizes in its ``config.json``."""

    name: str = "own model"
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn: PositiveInt
    vocab: PositiveInt
    tied_embeddings: bool = False
    windowed_layers: NonNegativeInt = 0
    window_tokens: PositiveInt | None = None
    experts: ExpertSizes | None = None
    state: StateSizes | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> "ModelSizes":
        special = self.windowed_layers + (self.state.layers if self.state else 0)
        if special > self.layers:
            raise ValueError(f"{special} windowed and state layers, but only {self.layers} layers")
        if bool(self.windowed_layers) != (self.window_tokens is not None):
            raise ValueError("windowed_layers and window_tokens belong together: give both or neither")
        return self


class GpuSizes(PlanSection):
    """A GPU that is not in the table. Math is dense."""

    name: str = "own gpu"
    bf16_tflops: PositiveFloat
    fp8_tflops: PositiveFloat | None = None
    int8_tops: PositiveFloat | None = None
    memory_gb_per_s: PositiveFloat
    memory_gb: PositiveFloat
    pcie_gb_per_s: PositiveFloat = 32.0
    nvlink_gb_per_s: PositiveFloat | None = None
    """One way."""


def _named_or_sized(value: Any) -> str:
    return "named" if isinstance(value, str) else "sized"


Model = Annotated[
    Annotated[str, AfterValidator(_known("model", MODEL_SHAPES)), Tag("named")]
    | Annotated[ModelSizes, Tag("sized")],
    Discriminator(_named_or_sized),
]
NamedGpu = Annotated[str, AfterValidator(_known("GPU", GPUS))]
NamedPrecision = Annotated[str, AfterValidator(_known("precision", PRECISIONS))]
AnyGpu = Annotated[
    Annotated[NamedGpu, Tag("named")] | Annotated[GpuSizes, Tag("sized")], Discriminator(_named_or_sized)
]


class RooflineReplica(PlanSection):
    """A replica as its model and GPUs make it. Shares of the peaks are those of ``RooflineStepTime``."""

    kind: Literal["roofline"]
    model: Model
    gpu: AnyGpu
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """Of one replica (tensor parallel)."""
    precision: NamedPrecision = "bf16"
    kv_bits: Literal[16, 8] = 16
    math_share: PositiveShare = _FITTED.math
    """Of the products that were measured on the GPU, in projections and MLPs."""
    expert_math_share: PositiveShare = _FITTED.expert_math
    """Of that, in the products of a mixture's experts."""
    attention_share: PositiveShare = _FITTED.attention_math
    """Of the same, in attention of a prefill."""
    bandwidth_share: PositiveShare = _FITTED.bandwidth
    """Of the large reads that were measured on the GPU, reading weights."""
    kv_bandwidth_share: PositiveShare = _FITTED.kv_bandwidth
    """Of the same, reading KV."""
    link_share: PositiveShare = _FITTED.link
    """Of the links' rate, in large all-reduces."""
    link_latency_us: NonNegativeFloat = _FITTED.all_reduce_s * 1e6
    """Of one all-reduce; two per layer and step when there are several GPUs."""
    step_overhead_ms: NonNegativeFloat = _FITTED.step_s * 1e3
    """Of every step, beside its kernels."""
    sequence_overhead_us: NonNegativeFloat = _FITTED.sequence_s * 1e6
    """Of every sequence in a step."""
    memory_share: PositiveShare = 0.9
    """Of the memory that the engine may take (vLLM's ``gpu_memory_utilization``)."""
    reserve_gb: NonNegativeFloat = 1.7
    """Per GPU, for activations and graphs. 1.7 gives the KV room of ``vllm_measured``'s RTX 4090."""
    max_running: PositiveInt = 256
    max_batched_tokens: PositiveInt = 8_192


class MeasuredReplica(PlanSection):
    """A replica as it was measured."""

    kind: Literal["measured"]
    prefill_us_per_token: PositiveFloat
    prefill_fixed_ms: NonNegativeFloat = 0.0
    attention_tokens: PositiveFloat | None = None
    """Position at which attention doubles a token's cost; without it prefill is linear."""
    decode_step_ms: PositiveFloat = 8.0
    decode_us_per_sequence: NonNegativeFloat = 60.0
    decode_ns_per_context_token: NonNegativeFloat = 0.0
    kv_tokens: PositiveInt = 400_000
    kv_bytes_per_token: PositiveFloat = 131_072.0
    gpus: PositiveInt = 1
    max_running: PositiveInt = 256
    max_batched_tokens: PositiveInt = 8_192


ReplicaPlan = Annotated[RooflineReplica | MeasuredReplica, Field(discriminator="kind")]
