"""A step from first principles: what it multiplies over peak math, what it reads over memory bandwidth.

The roofline (Williams, Waterman and Patterson, 2009), applied to the parts of a transformer's step one after
another, because they run one after another::

    seconds = step_s + sequence_s * sequences                                 launches, sampling, scheduling
            + max(2 * weights * tokens / math, weight bytes / bandwidth)      projections, MLPs
            + hypot(of experts: active ones' math, touched ones' bytes)         mixtures of experts only
            + activations that kernels between the products read and write / bandwidth
            + output layer, once per sampled token                            the same way
            + KV bytes that decodes read / bandwidth                          decode attention
            + sum over chunks of 4 * heads * width * count * (start + count / 2) / math     prefill attention
            + two all-reduces a layer over the links                          tensor parallel only

Decode is bound by bytes (weights once per step, KV once per sequence), prefill by math with the quadratic
attention term, and a mixed step by both. Math and bandwidth are what the GPU was *measured* to reach in large
products and large reads (``gpus.py``): cards differ in that, so it has to be known per card if figures of one
are to hold on another. ``Efficiency`` is what a model's kernels reach of that, and what a step
costs beside them: the same on every card. Its defaults were fitted to measured vLLM runs, ``expert_math`` to
measured kernels (``sim/fidelity``, docs/simulator.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import hypot
from typing import Protocol

from replica.contract.roofline.gpus import GPUS, Gpu
from replica.contract.roofline.model_shape import ModelShape
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import EMBEDDING_BITS, PRECISIONS, Precision


class Chunk(Protocol):
    """Part of one prompt's prefill."""

    @property
    def start(self) -> int:
        """Tokens before it."""

    @property
    def count(self) -> int:
        """Its tokens."""

    @property
    def samples(self) -> bool:
        """The prompt's last: it gives a token."""


class Step(Protocol):
    """What one step computes; ``replica.batch.Batch`` is one, ``PlainStep`` another."""

    @property
    def decode_sequences(self) -> int:
        """Sequences that generate one token each."""

    @property
    def decode_context_tokens(self) -> int:
        """KV positions those read, together."""

    @property
    def prefills(self) -> Sequence[Chunk]:
        """Chunks of prompts."""

    @property
    def tokens(self) -> int:
        """Positions computed: one per decode, all of the chunks."""


@dataclass(frozen=True, slots=True)
class PlainChunk:
    """A ``Chunk``: ``count`` tokens after ``start``."""

    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A ``Step`` given by its figures."""

    decode_sequences: int = 0
    decode_context_tokens: int = 0
    prefills: tuple[PlainChunk, ...] = ()

    @property
    def tokens(self) -> int:
        """Positions computed."""
        return self.decode_sequences + sum(chunk.count for chunk in self.prefills)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and what a step costs beside its kernels."""

    math: float = 0.95
    """Of the GPU's measured products, in matrix products over many tokens."""
    expert_math: float = 0.65
    """Of ``math``, in the grouped products of experts."""
    attention_math: float = 0.50
    """Of the GPU's measured 16-bit products, in prefill attention."""
    bandwidth: float = 0.967
    """Of the GPU's measured large reads, reading weights."""
    kv_bandwidth: float = 0.96
    """Of the same, reading KV, which lies in pages."""
    step_s: float = 0.00193
    """Per step, whatever is in it."""
    sequence_s: float = 27e-6
    """Per sequence in the step: input preparation, sampling, output processing."""
    link: float = 0.7
    """Of the links' rate, in all-reduces of large messages."""
    all_reduce_s: float = 10e-6
    """Latency of one all-reduce, however small."""

    @classmethod
    def parse(cls, text: str) -> "Efficiency":
        """From ``KEY=VALUE,KEY=VALUE``; what is not named is as by default. Raises ValueError.

        >>> Efficiency.parse("math=0.8,step_s=0.003").bandwidth == Efficiency().bandwidth
        True
        """
        names = [one.name for one in fields(cls)]
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                values[name] = float(value)
                if name not in names or not 0 <= values[name] < 10:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"{part!r}; expected KEY=VALUE, 0 or more, with KEY one of {', '.join(names)}"
                ) from None
        return cls(**values)

    def __str__(self) -> str:
        return ",".join(f"{one.name}={getattr(self, one.name):.4g}" for one in fields(self))


@dataclass(frozen=True, slots=True)
class RooflineStepTime:
    """Seconds of a step of ``shape`` on ``tensor_parallel`` GPUs.

    Llama 3.1 8B in bf16 on one H100: a decode step reads 15 GB of weights, and the KV of what runs.

    >>> model = RooflineStepTime.of("llama-3.1-8b", "h100")
    >>> round(1e3 * model.seconds(PlainStep(1, 1_000)), 2)
    7.3
    >>> round(1e3 * model.seconds(PlainStep(64, 64_000)), 2)         # 63 more of 131 MB of KV each
    12.07
    >>> int4 = RooflineStepTime.of("llama-3.1-8b", "h100", "int4")        # weights a quarter, KV as before
    >>> round(1e3 * int4.seconds(PlainStep(1, 1_000)), 2)
    3.65
    """

    shape: ModelShape
    gpu: Gpu
    precision: Precision
    tensor_parallel: int = 1
    kv_bits: float = 16.0
    efficiency: Efficiency = field(default_factory=Efficiency)

    @classmethod
    def of(
        cls,
        model: str,
        gpu: str,
        precision: str = "bf16",
        *,
        tensor_parallel: int = 1,
        kv_bits: float = 16.0,
        efficiency: Efficiency | None = None,
    ) -> "RooflineStepTime":
        """By names; raises ValueError that lists the names there are, or says what does not fit."""
        for what, name, table in (
            ("model", model, MODEL_SHAPES),
            ("GPU", gpu, GPUS),
            ("precision", precision, PRECISIONS),
        ):
            if name not in table:
                raise ValueError(f"{what} {name!r} is unknown; expected one of {', '.join(table)}")
        made = cls(
            MODEL_SHAPES[model],
            GPUS[gpu],
            PRECISIONS[precision],
            tensor_parallel,
            kv_bits,
            efficiency or Efficiency(),
        )
        if made.precision.math not in made.gpu.math_per_s:
            raise ValueError(f"precision {precision}: {gpu} has no {made.precision.math} math; use another")
        if tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {tensor_parallel}; expected 1 or more GPUs")
        return made

    def seconds(self, batch: Step) -> float:
        """Seconds to compute ``batch``."""
        shape, gpu, share = self.shape, self.gpu, self.efficiency
        gpus = self.tensor_parallel * gpu.matmul_share
        math_per_s = gpu.math_per_s[self.precision.math] * gpus * share.math
        math16_per_s = gpu.math_per_s["bf16"] * gpus
        bytes_per_s = gpu.read_bytes_per_s * self.tensor_parallel * share.bandwidth
        kv_bytes_per_s = gpu.read_bytes_per_s * self.tensor_parallel * share.kv_bandwidth
        tokens, sampled, chunks = batch.tokens, batch.decode_sequences, batch.prefills
        attention_s = self._decode_kv_bytes(batch) / kv_bytes_per_s
        for chunk in chunks:
            sampled += chunk.samples
            flops = chunk.count * shape.attention_flops(chunk.start + chunk.count / 2.0)
            read = (chunk.start + chunk.count) * shape.kv_bytes_per_token(self.kv_bits)
            attention_s += max(flops / (math16_per_s * share.attention_math), read / kv_bytes_per_s)
        output = shape.vocab * shape.hidden
        dense = shape.active_linear_weights - shape.active_expert_weights
        weight_bytes = self.precision.weight_bits / 8.0
        return (
            share.step_s
            + share.sequence_s * (batch.decode_sequences + len(chunks))
            + max(2.0 * dense * tokens / math_per_s, dense * weight_bytes / bytes_per_s)
            + self.experts_s(tokens)
            + max(
                shape.logits_flops * sampled / (math16_per_s * share.math),
                output * EMBEDDING_BITS / 8.0 / bytes_per_s,
            )
            + attention_s
            + tokens * self._activation_bytes() / bytes_per_s
            + self._links_s(tokens)
        )

    def experts_s(self, tokens: int, touched_share: float | None = None) -> float:
        """Seconds of the experts of all layers over ``tokens`` tokens; 0 for a dense model.

        Reading overlaps with math only in part where each expert has few tokens. The root of the sum of
        squares is within 10% of measured kernels where all experts are touched; the longer of the two would
        be a quarter too short (``sim/fidelity/expert_kernels.py``). ``touched_share`` of the experts is read;
        by default what even routing gives.
        """
        shape, gpu, share = self.shape, self.gpu, self.efficiency
        if shape.experts is None:
            return 0.0
        if touched_share is None:
            touched_share = shape.experts.touched_share(tokens)
        math_per_s = gpu.math_per_s[self.precision.math] * gpu.matmul_share * share.math * share.expert_math
        read = shape.expert_weights * touched_share * self.precision.weight_bits / 8.0
        return (
            hypot(
                2.0 * shape.active_expert_weights * tokens / math_per_s,
                read / (gpu.read_bytes_per_s * share.bandwidth),
            )
            / self.tensor_parallel
        )

    def _activation_bytes(self) -> float:
        """Of one token, by kernels that are not products, two bytes an element.

        Per layer two norms with their residuals (8 hidden), rotation of queries and keys and attention's
        ends (5 hidden), and the gate (3 of the MLP's width).
        """
        shape = self.shape
        experts = shape.experts
        width = shape.ffn if experts is None else experts.active * experts.ffn + experts.shared_ffn
        return 2.0 * shape.layers * (13 * shape.hidden + 3 * width)

    def _decode_kv_bytes(self, batch: Step) -> float:
        """KV and recurrent state that the decodes read; windows as if all contexts were equally long."""
        sequences = batch.decode_sequences
        if not sequences:
            return 0.0
        mean = batch.decode_context_tokens / sequences
        return sequences * self._kv_bytes(mean)

    def _kv_bytes(self, context_tokens: float) -> float:
        shape = self.shape
        kept = shape.full_layers * context_tokens
        if shape.window_tokens is not None:
            kept += shape.windowed_layers * min(context_tokens, float(shape.window_tokens))
        return kept * shape.kv_elements_per_layer_token * self.kv_bits / 8.0 + shape.state_bytes

    def _links_s(self, tokens: int) -> float:
        """Two ring all-reduces of the hidden state per layer: ``2 (n - 1) / n`` of it over each link."""
        count = self.tensor_parallel
        if count == 1:
            return 0.0
        rate = self.gpu.nvlink_bytes_per_s or self.gpu.pcie_bytes_per_s
        moved = 2.0 * (count - 1) / count * tokens * self.shape.hidden * 2.0
        return 2 * self.shape.layers * (self.efficiency.all_reduce_s + moved / (rate * self.efficiency.link))

    def kv_capacity_tokens(self, memory_share: float = 0.9, activation_bytes: float = 2e9) -> int:
        """KV tokens that fit beside the weights. Raises ValueError when the weights alone do not.

        ``memory_share`` of each GPU may be used (vLLM's ``gpu_memory_utilization``), ``activation_bytes`` of
        that are for a step's working memory.
        """
        per_token = self.shape.kv_bytes_per_token(self.kv_bits)
        if not per_token:
            raise ValueError(f"{self.shape.name} keeps no KV that grows with its tokens")
        room = self.tensor_parallel * (self.gpu.memory_bytes * memory_share - activation_bytes)
        left = room - self.shape.weight_bytes(self.precision.weight_bits)
        if left <= 0:
            raise ValueError(
                f"{self.shape.name} in {self.precision.name} does not fit {self.tensor_parallel} x "
                f"{self.gpu.name}: use more GPUs or fewer bits"
            )
        return int(left / per_token)
