"""One replica on the worksheet: from model and GPU to microseconds per token and room for KV."""

from sim.plan.plan_error import PlanError
from sim.plan.replica_config import GpuSizes, MeasuredReplica, ModelSizes, RooflineReplica
from sim.plan.replica_cost import ReplicaCost
from sim.plan.worksheet import Worksheet
from sim.step_time.gpus import GPUS, Gpu
from sim.step_time.model_shape import Experts, ModelShape, RecurrentState
from sim.step_time.model_shapes import MODEL_SHAPES
from sim.step_time.precisions import EMBEDDING_BITS, PRECISIONS, Precision


def write_replica(sheet: Worksheet, replica: RooflineReplica | MeasuredReplica) -> ReplicaCost:
    """The replica's lines; raises ``PlanError`` when the model cannot run on it."""
    if isinstance(replica, MeasuredReplica):
        return _measured(sheet, replica)
    return _Roofline(sheet, replica).write()


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


def describe(replica: RooflineReplica | MeasuredReplica) -> str:
    """In a few words, for titles: ``llama-3.1-8b in bf16 on 1 x h100``."""
    if isinstance(replica, MeasuredReplica):
        return f"a measured replica ({replica.prefill_us_per_token:g} µs per prefill token)"
    return f"{model_shape(replica).name} in {replica.precision} on {replica.gpus} x {gpu(replica).name}"


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


def _measured(sheet: Worksheet, replica: MeasuredReplica) -> ReplicaCost:
    sheet.given("gpus", replica.gpus, "GPUs", "of one replica", "plan")
    sheet.given("token_us", replica.prefill_us_per_token, "µs/token", "prefill", "plan")
    sheet.given("fixed_ms", replica.prefill_fixed_ms, "ms", "of every prefill", "plan")
    if replica.attention_tokens is not None:
        says = "position at which attention doubles a token's prefill"
        sheet.given("attention_tokens", replica.attention_tokens, "tokens", says, "plan")
    sheet.given("step_ms", replica.decode_step_ms, "ms", "a decode step, whatever is in it", "plan")
    sheet.given("sequence_us", replica.decode_us_per_sequence, "µs", "and per decoding sequence", "plan")
    says = "and per token of a sequence's context"
    sheet.given("context_ns", replica.decode_ns_per_context_token, "ns", says, "plan")
    sheet.given("kv_tokens", replica.kv_tokens, "tokens", "room for KV", "plan")
    sheet.given("kv_bytes", replica.kv_bytes_per_token, "bytes/token", "KV", "plan")
    return ReplicaCost(
        step_ms=replica.decode_step_ms,
        fixed_ms=replica.prefill_fixed_ms,
        token_us=replica.prefill_us_per_token,
        sequence_us=replica.decode_us_per_sequence,
        attention_tokens=replica.attention_tokens,
        context_ns=replica.decode_ns_per_context_token,
        kv_tokens=replica.kv_tokens,
        kv_bytes=replica.kv_bytes_per_token,
        gpus=replica.gpus,
        max_running=replica.max_running,
        max_batched_tokens=replica.max_batched_tokens,
    )


class _Roofline:
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

    def write(self) -> ReplicaCost:
        self._weights()
        self._prefill()
        self._decode()
        self._memory()
        sheet, replica = self._sheet, self._replica
        return ReplicaCost(
            step_ms=sheet["step_ms"],
            fixed_ms=sheet["fixed_ms"],
            token_us=sheet["token_us"],
            sequence_us=0.0,
            attention_tokens=sheet["attention_tokens"] if self._shape.full_layers else None,
            context_ns=sheet["context_ns"],
            math_us=sheet["math_us"],
            kv_tokens=sheet["kv_tokens"],
            kv_bytes=sheet["kv_bytes"],
            gpus=replica.gpus,
            max_running=replica.max_running,
            max_batched_tokens=replica.max_batched_tokens,
        )

    def _assumed(self, name: str, key: str, unit: str, says: str) -> None:
        source = (
            "plan" if key in self._replica.model_fields_set else "assumed; replace it by what you measure"
        )
        self._sheet.given(name, getattr(self._replica, key), unit, says, source)

    def _weights(self) -> None:
        sheet, shape, precision = self._sheet, self._shape, self._precision
        sheet.given("gpus", self._replica.gpus, "GPUs", "of one replica", "plan")
        sheet.given("linear_b", shape.linear_weights / 1e9, "billion", "weights in layers", shape.source)
        says = "weights of embedding and output layer"
        sheet.given("embedding_b", shape.embedding_weights / 1e9, "billion", says, shape.source)
        says = f"per weight in layers ({precision.name})"
        sheet.given("weight_bits", precision.weight_bits, "bits", says, "sim/step_time/precisions.py")
        sheet.line(
            "weight_gb",
            f"(linear_b * weight_bits + embedding_b * {EMBEDDING_BITS:g}) / 8",
            "GB",
            "weights in memory",
        )

    def _prefill(self) -> None:
        sheet, shape, card = self._sheet, self._shape, self._gpu
        active = shape.active_linear_weights / 1e9
        says = "weights that one token is multiplied with"
        sheet.given("active_b", active, "billion", says, shape.source)
        sheet.given(
            "peak_tflops", card.math_per_s[self._precision.math] / 1e12, "TFLOPS", "peak", card.source
        )
        self._assumed("math_share", "math_share", "", "of the peak that prefill reaches")
        sheet.line("token_gflop", "2 * active_b", "GFLOP/token", "multiply and add per weight")
        says = "math of one token"
        sheet.line("math_us", "token_gflop / (gpus * peak_tflops * math_share) * 1000", "µs", says)
        if self._replica.gpus > 1:
            self._links()
        sheet.line(
            "token_us", "math_us + link_us" if self._replica.gpus > 1 else "math_us", "µs/token", "prefill"
        )
        self._assumed("fixed_ms", "step_overhead_ms", "ms", "overhead of every step")
        if shape.full_layers:
            self._attention()

    def _links(self) -> None:
        sheet, shape, card = self._sheet, self._shape, self._gpu
        link = card.nvlink_bytes_per_s or card.pcie_bytes_per_s
        sheet.given("layers", shape.layers, "", "layers", shape.source)
        sheet.given("hidden", shape.hidden, "", "width", shape.source)
        sheet.given("link_gb_per_s", link / 1e9, "GB/s", "between GPUs, one way", card.source)
        self._assumed("link_share", "link_share", "", "of it that an all-reduce reaches")
        self._assumed("link_latency_us", "link_latency_us", "µs", "of an all-reduce of little data")
        sheet.line(
            "link_us",
            "layers * 2 * hidden * 2 * 2 * (gpus - 1) / gpus / (link_gb_per_s * link_share) / 1000",
            "µs",
            "two all-reduces a layer, 2 bytes a value, each sent 2 (g - 1) / g times",
        )

    def _attention(self) -> None:
        sheet, shape = self._sheet, self._shape
        says = "attention, per token attended to"
        source = f"{shape.full_layers} layers x {shape.attention_layer_flops:g} FLOP: {shape.source}"
        mflop = shape.full_layers * shape.attention_layer_flops / 1e6
        sheet.given("attention_mflop", mflop, "MFLOP", says, source)
        bf16 = self._gpu.math_per_s["bf16"] / 1e12
        says = "peak in 16 bits, in which attention computes"
        sheet.given("bf16_tflops", bf16, "TFLOPS", says, self._gpu.source)
        sheet.line(
            "attention_tokens",
            "token_us / (attention_mflop / (gpus * bf16_tflops * math_share))",
            "tokens",
            "position at which attention doubles a token's prefill",
        )

    def _decode(self) -> None:
        sheet, shape, card = self._sheet, self._shape, self._gpu
        says = "memory bandwidth of one GPU"
        sheet.given("memory_gb_per_s", card.memory_bytes_per_s / 1e9, "GB/s", says, card.source)
        self._assumed("bandwidth_share", "bandwidth_share", "", "of it that reading reaches")
        table_gb = 0.0 if shape.tied_embeddings else shape.vocab * shape.hidden * EMBEDDING_BITS / 8e9
        says = "the embedding table, of which a step reads next to nothing"
        sheet.given("table_gb", table_gb, "GB", says, shape.source)
        says = "reading all weights once"
        formula = "(weight_gb - table_gb) / (gpus * memory_gb_per_s * bandwidth_share) * 1000"
        sheet.line("read_ms", formula, "ms", says)
        if self._replica.gpus > 1:
            sheet.line(
                "reduce_ms", "2 * layers * link_latency_us / 1000", "ms", "all-reduces of a decode step"
            )
        formula = "read_ms + fixed_ms" + (" + reduce_ms" if self._replica.gpus > 1 else "")
        sheet.line("step_ms", formula, "ms", "a decode step, whatever is in it")
        if shape.experts is not None:
            sheet.note(
                "A mixture of experts reads all its experts only when many tokens are in a step: small "
                "batches take less than step_ms."
            )

    def _memory(self) -> None:
        sheet, shape, card, replica = self._sheet, self._shape, self._gpu, self._replica
        says = "K and V elements per token and layer"
        sheet.given("kv_elements", shape.kv_elements_per_layer_token, "", says, shape.source)
        sheet.given(
            "full_layers", shape.full_layers, "", "layers whose KV grows with each token", shape.source
        )
        sheet.given("kv_bits", replica.kv_bits, "bits", "per K or V element", "plan")
        copies = _kv_copies(shape, replica.gpus)
        formula = "full_layers * kv_elements * kv_bits / 8"
        if copies > 1:
            says = "copies of the KV: fewer KV heads than GPUs"
            sheet.given("kv_copies", copies, "", says, f"{replica.gpus} GPUs, {shape.kv_heads} KV heads")
            formula += " * kv_copies"
        sheet.line("kv_bytes", formula, "bytes/token", "KV of a token, all GPUs of the replica together")
        says = "reading one token of a sequence's context"
        sheet.line("context_ns", "kv_bytes / (gpus * memory_gb_per_s * bandwidth_share)", "ns", says)
        sheet.given("memory_gb", card.memory_bytes / 1e9, "GB", "memory of one GPU", card.source)
        self._assumed("memory_share", "memory_share", "", "of it that the engine may take")
        self._assumed("reserve_gb", "reserve_gb", "GB", "per GPU for activations")
        says = "left for KV"
        formula = "gpus * (memory_gb * memory_share - reserve_gb) - weight_gb"
        if sheet.line("kv_gb", formula, "GB", says) <= 0:
            raise PlanError(
                f"replica: {shape.name} does not fit: {sheet['weight_gb']:.1f} GB of weights in "
                f"{replica.precision} leave {sheet['kv_gb']:.1f} GB for KV on {replica.gpus} x {card.name}; "
                "expected more than 0, take more or larger GPUs, or a smaller precision"
            )
        if shape.full_layers == 0:
            raise PlanError(f"replica.model {shape.name}: no layer keeps KV; expected at least one")
        sheet.line("kv_tokens", "kv_gb * 1000000000 / kv_bytes", "tokens", "room for KV")


def _kv_copies(shape: ModelShape, gpus: int) -> int:
    """How often each GPU group repeats the KV: heads are split over GPUs, a latent vector is not."""
    heads = 1 if shape.latent is not None else shape.kv_heads
    return max(1, gpus // heads)
