"""A replica from model and GPU: microseconds per token and room for KV, as ``RooflineStepTime`` has them.

The lines are the closed form of the simulator's roofline for steps that are all prefill or all decode.
"""

from replica.contract.roofline.model_shape import ModelShape
from replica.contract.roofline.precisions import EMBEDDING_BITS, PRECISIONS, Precision
from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from sim.plan.plan_error import PlanError
from sim.plan.replica_config import RooflineReplica
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_parts import gpu, model_shape
from sim.plan.worksheet import Worksheet

EXPERT_TOKENS = 64
"""Tokens of a decode step when it is asked how many experts it reads."""

_TABLES = "replica/contract/roofline"


class RooflineSheet:
    """Writes a roofline replica's lines in order: weights, prefill, decode, memory."""

    def __init__(self, sheet: Worksheet, replica: RooflineReplica) -> None:
        self._sheet = sheet
        self._replica = replica
        self._shape = model_shape(replica)
        self._gpu = gpu(replica)
        self._precision: Precision = PRECISIONS[replica.precision]
        if self._precision.math not in self._gpu.math_per_s:
            raise PlanError(
                f"replica.precision {replica.precision}: {self._gpu.name} has no {self._precision.math} "
                f"math; expected a precision that computes in {' or '.join(sorted(self._gpu.math_per_s))}"
            )
        if self._shape.full_layers == 0:
            raise PlanError(f"replica.model {self._shape.name}: no layer keeps KV; expected at least one")

    def write(self) -> ReplicaCost:
        """All lines; raises ``PlanError`` when the model does not fit."""
        self._weights()
        self._prefill()
        self._decode()
        self._memory()
        sheet, replica = self._sheet, self._replica
        return ReplicaCost(
            step_ms=sheet["step_ms"],
            fixed_ms=sheet["fixed_ms"],
            token_us=sheet["token_us"],
            sequence_us=sheet["sequence_us"],
            attention_tokens=sheet["attention_tokens"],
            context_ns=sheet["context_ns"],
            math_us=sheet["math_us"],
            kv_tokens=sheet["kv_tokens"],
            kv_bytes=sheet["kv_bytes"],
            gpus=replica.gpus,
            roofline=self._step_time(),
            max_running=replica.max_running,
            max_batched_tokens=replica.max_batched_tokens,
        )

    def _step_time(self) -> RooflineStepTime:
        replica = self._replica
        efficiency = Efficiency(
            math=replica.math_share,
            expert_math=replica.expert_math_share,
            attention_math=replica.attention_share,
            bandwidth=replica.bandwidth_share,
            kv_bandwidth=replica.kv_bandwidth_share,
            step_s=replica.step_overhead_ms / 1e3,
            sequence_s=replica.sequence_overhead_us / 1e6,
            link=replica.link_share,
            all_reduce_s=replica.link_latency_us / 1e6,
        )
        return RooflineStepTime(
            self._shape, self._gpu, self._precision, replica.gpus, replica.kv_bits, efficiency
        )

    def _given(self, name: str, key: str, unit: str, says: str) -> None:
        source = "plan" if key in self._replica.model_fields_set else "fitted (docs/simulator.md) or usual"
        self._sheet.given(name, getattr(self._replica, key), unit, says, source)

    def _weights(self) -> None:
        sheet, shape, precision = self._sheet, self._shape, self._precision
        sheet.given("gpus", self._replica.gpus, "GPUs", "of one replica", "plan")
        sheet.given("layers", shape.layers, "", "layers", shape.source)
        sheet.given("hidden", shape.hidden, "", "width", shape.source)
        sheet.given("vocab", shape.vocab, "", "vocabulary", shape.source)
        sheet.given("linear_b", shape.linear_weights / 1e9, "billion", "weights in layers", shape.source)
        says = f"per weight in layers ({precision.name})"
        sheet.given(
            "weight_bits", precision.weight_bits, "bits", says, "replica/contract/roofline/precisions.py"
        )
        sheet.line("linear_gb", "linear_b * weight_bits / 8", "GB", "weights in layers")
        formula = f"vocab * hidden * {EMBEDDING_BITS:g} / 8 / 1000000000"
        sheet.line("output_gb", formula, "GB", "output layer")
        tables = "output_gb" if shape.tied_embeddings else "2 * output_gb"
        sheet.line("weight_gb", f"linear_gb + {tables}", "GB", "weights in memory, embedding included")

    def _prefill(self) -> None:
        sheet, shape, card = self._sheet, self._shape, self._gpu
        active = shape.active_linear_weights / 1e9
        says = "weights that one token is multiplied with"
        sheet.given("active_b", active, "billion", says, shape.source)
        sheet.given(
            "peak_tflops", card.math_per_s[self._precision.math] / 1e12, "TFLOPS", "peak", card.source
        )
        says = "of the peak that large products reach"
        sheet.given("matmul_share", card.matmul_share, "", says, f"{_TABLES}/gpus.py")
        self._given("math_share", "math_share", "", "of that, in the model's products")
        sheet.line("token_gflop", "2 * active_b", "GFLOP/token", "multiply and add per weight")
        work = "token_gflop"
        experts = shape.experts
        if experts is not None:
            says = "of them in experts"
            sheet.given("active_expert_b", shape.active_expert_weights / 1e9, "billion", says, shape.source)
            self._given("expert_math_share", "expert_math_share", "", "of that, in products of experts")
            work = "(token_gflop + 2 * active_expert_b * (1 / expert_math_share - 1))"
        formula = f"{work} / (gpus * peak_tflops * matmul_share * math_share) * 1000"
        sheet.line("math_us", formula, "µs", "math of one token")
        width = shape.ffn if experts is None else experts.active * experts.ffn + experts.shared_ffn
        sheet.given("mlp_width", width, "", "of the MLP, active experts together", shape.source)
        says = "memory bandwidth of one GPU"
        sheet.given("memory_gb_per_s", card.memory_bytes_per_s / 1e9, "GB/s", says, card.source)
        says = "of it that one large read reaches"
        sheet.given("read_share", card.read_share, "", says, f"{_TABLES}/gpus.py")
        self._given("bandwidth_share", "bandwidth_share", "", "of that, reading weights")
        says = "norms, rotation and gate read and write (13 hidden + 3 width) a layer, 2 bytes each"
        formula = (
            "2 * layers * (13 * hidden + 3 * mlp_width)"
            " / (gpus * memory_gb_per_s * read_share * bandwidth_share) / 1000"
        )
        sheet.line("activation_us", formula, "µs", says)
        parts = "math_us + activation_us"
        if self._replica.gpus > 1:
            self._links()
            parts += " + link_us"
        sheet.line("token_us", parts, "µs/token", "prefill")
        self._attention()

    def _links(self) -> None:
        sheet, card = self._sheet, self._gpu
        link = card.nvlink_bytes_per_s or card.pcie_bytes_per_s
        sheet.given("link_gb_per_s", link / 1e9, "GB/s", "between GPUs, one way", card.source)
        self._given("link_share", "link_share", "", "of it that an all-reduce reaches")
        self._given("link_latency_us", "link_latency_us", "µs", "of an all-reduce")
        sheet.line(
            "link_us",
            "layers * 2 * hidden * 2 * 2 * (gpus - 1) / gpus / (link_gb_per_s * link_share) / 1000",
            "µs",
            "two all-reduces a layer, 2 bytes a value, each sent 2 (g - 1) / g times",
        )

    def _attention(self) -> None:
        sheet, shape = self._sheet, self._shape
        sheet.given(
            "full_layers", shape.full_layers, "", "layers whose KV grows with each token", shape.source
        )
        flop = shape.attention_layer_flops / 1e6
        says = "of one layer, per token attended to: 4 x heads x width"
        sheet.given("attention_mflop", flop, "MFLOP", says, shape.source)
        bf16 = self._gpu.math_per_s["bf16"] / 1e12
        says = "peak in 16 bits, in which attention computes"
        sheet.given("bf16_tflops", bf16, "TFLOPS", says, self._gpu.source)
        self._given("attention_share", "attention_share", "", "of products, that prefill attention reaches")
        sheet.line(
            "attention_us",
            "full_layers * attention_mflop / (gpus * bf16_tflops * matmul_share * attention_share)",
            "µs",
            "attention of one token, per token attended to",
        )
        says = "position at which attention doubles a token's prefill"
        sheet.line("attention_tokens", "token_us / attention_us", "tokens", says)

    def _decode(self) -> None:
        sheet, shape, replica = self._sheet, self._shape, self._replica
        bandwidth = "(gpus * memory_gb_per_s * read_share * bandwidth_share)"
        read = "linear_gb"
        if shape.experts is not None:
            read = self._experts()
        sheet.line("read_ms", f"{read} / {bandwidth} * 1000", "ms", "reading the layers' weights once")
        sheet.line("output_ms", f"output_gb / {bandwidth} * 1000", "ms", "reading the output layer once")
        self._given("overhead_ms", "step_overhead_ms", "ms", "of every step, beside its kernels")
        fixed = "overhead_ms + output_ms"
        if replica.gpus > 1:
            sheet.line(
                "reduce_ms", "2 * layers * link_latency_us / 1000", "ms", "latency of a step's all-reduces"
            )
            fixed += " + reduce_ms"
        sheet.line("fixed_ms", fixed, "ms", "of a prefill step, beside its tokens")
        sheet.line("step_ms", "read_ms + fixed_ms", "ms", "a decode step, whatever is in it")
        says = "K and V elements per token and layer"
        sheet.given("kv_elements", shape.kv_elements_per_layer_token, "", says, shape.source)
        sheet.given("kv_bits", replica.kv_bits, "bits", "per K or V element", "plan")
        formula = "full_layers * kv_elements * kv_bits / 8"
        copies = _kv_copies(shape, replica.gpus)
        if copies > 1:
            says = "copies of the KV: fewer KV heads than GPUs"
            sheet.given("kv_copies", copies, "", says, f"{replica.gpus} GPUs, {shape.kv_heads} KV heads")
            formula += " * kv_copies"
        sheet.line("kv_bytes", formula, "bytes/token", "KV of a token, all GPUs of the replica together")
        self._given(
            "kv_bandwidth_share", "kv_bandwidth_share", "", "of what a large read reaches, reading KV"
        )
        kv_bandwidth = "(gpus * memory_gb_per_s * read_share * kv_bandwidth_share)"
        says = "reading one token of a sequence's context"
        sheet.line("context_ns", f"kv_bytes / {kv_bandwidth}", "ns", says)
        self._per_sequence(kv_bandwidth)

    def _experts(self) -> str:
        """What a decode step reads of the layers' weights, in GB: of the experts those that are asked for."""
        sheet, shape = self._sheet, self._shape
        assert shape.experts is not None
        sheet.given("expert_b", shape.expert_weights / 1e9, "billion", "weights in experts", shape.source)
        sheet.given("expert_count", shape.experts.count, "", "experts of a layer", shape.source)
        sheet.given("expert_active", shape.experts.active, "", "of them for one token", shape.source)
        says = "a step is taken to have; smaller ones read fewer experts and take less than step_ms"
        sheet.given("expert_tokens", EXPERT_TOKENS, "tokens", says, "assumed")
        says = "of the experts are asked for by any of them, if routing is even"
        formula = "1 - (1 - expert_active / expert_count) ** expert_tokens"
        sheet.line("expert_share", formula, "", says)
        return "(linear_gb - expert_b * weight_bits / 8 * (1 - expert_share))"

    def _per_sequence(self, kv_bandwidth: str) -> None:
        sheet, shape = self._sheet, self._shape
        self._given("sequence_overhead_us", "sequence_overhead_us", "µs", "of every sequence in a step")
        parts = "sequence_overhead_us + activation_us" + (" + link_us" if self._replica.gpus > 1 else "")
        constant = shape.kv_bytes(1 << 20, self._replica.kv_bits)
        constant -= (1 << 20) * shape.kv_bytes_per_token(self._replica.kv_bits)
        if constant:
            says = "windows and recurrent state of a long sequence, read in each step"
            sheet.given("fixed_mb", constant / 1e6, "MB", says, shape.source)
            parts += f" + fixed_mb * 1000 / {kv_bandwidth}"
        sheet.line("sequence_us", parts, "µs", "a decode step longer by this per sequence, its KV apart")

    def _memory(self) -> None:
        sheet, shape, card, replica = self._sheet, self._shape, self._gpu, self._replica
        sheet.given("memory_gb", card.memory_bytes / 1e9, "GB", "memory of one GPU", card.source)
        self._given("memory_share", "memory_share", "", "of it that the engine may take")
        self._given("reserve_gb", "reserve_gb", "GB", "per GPU for activations")
        says = "left for KV"
        formula = "gpus * (memory_gb * memory_share - reserve_gb) - weight_gb"
        if sheet.line("kv_gb", formula, "GB", says) <= 0:
            raise PlanError(
                f"replica: {shape.name} does not fit: {sheet['weight_gb']:.1f} GB of weights in "
                f"{replica.precision} leave {sheet['kv_gb']:.1f} GB for KV on {replica.gpus} x {card.name}; "
                "expected more than 0, take more or larger GPUs, or a smaller precision"
            )
        sheet.line("kv_tokens", "kv_gb * 1000000000 / kv_bytes", "tokens", "room for KV")


def _kv_copies(shape: ModelShape, gpus: int) -> int:
    """How often each GPU group repeats the KV: heads are split over GPUs, a latent vector is not."""
    heads = 1 if shape.latent is not None else shape.kv_heads
    return max(1, gpus // heads)
