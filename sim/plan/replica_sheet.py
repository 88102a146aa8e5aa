"""One replica on the worksheet: from model and GPU to microseconds per token and room for KV."""

from sim.plan.replica_config import MeasuredReplica, RooflineReplica
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_parts import gpu, model_shape
from sim.plan.roofline_sheet import RooflineSheet
from sim.plan.worksheet import Worksheet


def write_replica(sheet: Worksheet, replica: RooflineReplica | MeasuredReplica) -> ReplicaCost:
    """The replica's lines; raises ``PlanError`` when the model cannot run on it."""
    if isinstance(replica, MeasuredReplica):
        return _measured(sheet, replica)
    return RooflineSheet(sheet, replica).write()


def describe(replica: RooflineReplica | MeasuredReplica) -> str:
    """In a few words, for titles: ``llama-3.1-8b in bf16 on 1 x h100``."""
    if isinstance(replica, MeasuredReplica):
        return f"a measured replica ({replica.prefill_us_per_token:g} µs per prefill token)"
    return f"{model_shape(replica).name} in {replica.precision} on {replica.gpus} x {gpu(replica).name}"


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
