"""Memory: KV bytes per token, what a block size wastes and misses, how much cache a trace needs."""

from sim.plan.cache_curve import CacheCurve, cache_curve, coarser
from sim.plan.config import MemoryPlan
from sim.plan.replica_parts import model_shape
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.traffic_sheet import read_trace_named
from sim.plan.worksheet import Report, Worksheet
from sim.workload.trace import Trace

HASH_NS_PER_TOKEN = 25.0
HASH_NS_PER_BLOCK = 1_000.0
"""Of chained blake2b or sha256 digests from Python on one core: about 1 µs a block of 16
(``replica.contract.block_hash``), growing by 25 ns a token in large blocks."""
KERNEL_NOTES = (
    (1, "token by token: a radix cache; kernels that gather single tokens"),
    (16, "the usual paged kernels (vLLM, FlashInfer, FlashAttention 3)"),
    (32, "the least that vLLM's CPU kernel takes"),
    (256, "the least that FlashAttention 2 takes"),
)
"""From research/engines.md 7."""


def plan_memory(plan: MemoryPlan) -> Report:
    """The finished plan. Raises ``PlanError``. Nothing is left to simulate: the trace is replayed exactly."""
    sheet = Worksheet(plan.kind, plan.title or f"Memory: {describe(plan.replica)}")
    sheet.section("One replica")
    cost = write_replica(sheet, plan.replica)
    sheet.section("A request")
    sheet.given("sequence_tokens", plan.sequence_tokens, "tokens", "prompt and reply, mean", "plan")
    formula = "sequence_tokens * kv_bytes / 1000000"
    if model_shape(plan.replica).state is not None or model_shape(plan.replica).windowed_layers:
        formula += " + fixed_mb"
    sheet.line("sequence_mb", formula, "MB", "KV of one request")
    sheet.line("live", "kv_gb * 1000 / sequence_mb", "requests", "that fit at once, nothing shared")
    sheet.conclude(
        f"{cost.kv_bytes:,.0f} bytes of KV a token, room for {cost.kv_tokens:,.0f} tokens, "
        f"{sheet['live']:,.0f} requests of {plan.sequence_tokens:,} at once."
    )
    trace = None if plan.trace is None else read_trace_named(plan.trace, plan.requests)
    sheet.section("Block size")
    _block_sizes(sheet, plan, trace)
    if trace is not None:
        sheet.section(f"How much cache {trace.name} needs")
        _cache_needed(sheet, plan, cache_curve(trace), trace)
    return sheet.done()


def _block_sizes(sheet: Worksheet, plan: MemoryPlan, trace: Trace | None) -> None:
    sheet.given("hash_ns", HASH_NS_PER_TOKEN, "ns", "hashing a token", "measured, digests from Python")
    sheet.given("block_ns", HASH_NS_PER_BLOCK, "ns", "and per block", "measured, digests from Python")
    shape = model_shape(plan.replica)
    head_bytes = shape.kv_elements_per_layer_token * plan.replica.kv_bits / 8
    if shape.latent is None:
        head_bytes = shape.head_dim * plan.replica.kv_bits / 8
    sheet.given("head_bytes", head_bytes, "bytes", "of one token in one KV head", shape.source)
    rows = []
    for size in plan.block_tokens:
        with sheet.scope(f"b{size}"):
            sheet.given("block_tokens", size, "tokens", "block size", "plan")
            says = "of a request's memory is the empty end of its last block, mean"
            formula = "(block_tokens - 1) / 2 / (sequence_tokens + (block_tokens - 1) / 2)"
            sheet.line("waste", formula, "", says)
            says = "of a shared prefix are missed, mean: only whole blocks match"
            sheet.line("missed", "(block_tokens - 1) / 2", "tokens", says)
            says = "that a kernel reads in one piece, per head"
            sheet.line("piece_kb", "block_tokens * head_bytes / 1000", "kB", says)
            sheet.line("blocks", "sequence_tokens / block_tokens", "blocks", "of a request to keep track of")
            formula = "(sequence_tokens * hash_ns + blocks * block_ns) / 1000000"
            sheet.line("hash_ms", formula, "ms", "hashing a request")
            keys = ["waste", "missed", "piece_kb", "blocks", "hash_ms"]
            if trace is not None and size % trace.block_tokens == 0:
                curve = cache_curve(coarser(trace, size // trace.block_tokens))
                how = f"replayed: {len(trace.requests)} requests of {trace.name}"
                share = curve.ideal_tokens / curve.prompt_tokens
                sheet.found("ideal", share, "", "of prompt tokens an infinite cache has", how)
                keys.append("ideal")
            row = [f"{size}", *(f"b{size}_{key}" for key in keys)]
        rows.append([*row, *([""] if len(row) == 6 else [])])
    header = ("waste", ""), ("missed", "tokens"), ("piece", "kB"), ("blocks", ""), ("hashing", "ms")
    sheet.grid("Block sizes", [("block", ""), *header, ("ideal hit rate", "")], rows)
    for size, text in KERNEL_NOTES:
        if size in plan.block_tokens:
            sheet.note(f"Blocks of {size}: {text}.")
    sheet.conclude(_block_sizes_concluded(sheet, plan))


def _block_sizes_concluded(sheet: Worksheet, plan: MemoryPlan) -> str:
    first, last = min(plan.block_tokens), max(plan.block_tokens)
    return (
        f"Blocks of {first} waste {sheet[f'b{first}_waste']:.1%} of memory and miss "
        f"{sheet[f'b{first}_missed']:g} tokens of a prefix; blocks of {last} waste "
        f"{sheet[f'b{last}_waste']:.1%} and miss {sheet[f'b{last}_missed']:g}."
    )


def _cache_needed(sheet: Worksheet, plan: MemoryPlan, curve: CacheCurve, trace: Trace) -> None:
    how = f"replayed: {len(trace.requests)} requests of {trace.name}, blocks of {trace.block_tokens}"
    sheet.given("prompt_tokens", curve.prompt_tokens, "tokens", "of all prompts", how)
    sheet.given("unique_tokens", curve.unique_tokens, "tokens", "in different blocks of them", how)
    sheet.given("ideal_tokens", curve.ideal_tokens, "tokens", "that one infinite cache has", how)
    ideal = sheet.line("ideal_hit_rate", "ideal_tokens / prompt_tokens", "", "of prompt tokens, at best")
    output = sum(request.output_tokens for request in trace.requests)
    sheet.given("output_tokens", output, "tokens", "of all replies: they pass through the cache, too", how)
    formula = "1 + output_tokens / (prompt_tokens - ideal_tokens)"
    sheet.line("reply_factor", formula, "times", "more room for that, if replies stay as long as prompts")
    rows = []
    for share in plan.of_ideal:
        name = f"need_{share * 100:g}".replace(".", "_")
        with sheet.scope(name):
            says = f"smallest LRU cache with {share:.0%} of the ideal hits"
            stack = f"{how}: LRU stack distances"
            sheet.found("tokens", curve.capacity_for(share), "tokens", says, stack)
            sheet.line("with_replies", "tokens * reply_factor", "tokens", "room for replies included")
            sheet.line("gb", "with_replies * kv_bytes / 1000000000", "GB", "in bytes of this model")
            sheet.line("replicas", "with_replies / kv_tokens", "replicas", "whose KV room it fills")
        keys = ("tokens", "with_replies", "gb", "replicas")
        rows.append([f"{share:.0%} of ideal", *(f"{name}_{key}" for key in keys)])
    columns = [("hits", ""), ("cache", "tokens"), ("with replies", "tokens"), ("", "GB"), ("replicas", "")]
    sheet.grid("Cache needed, as one pool", columns, rows)
    says = "of the fleet, as one pool"
    sheet.given("replicas", plan.replicas, "replicas", "in the fleet", "plan")
    sheet.line("fleet_tokens", "replicas * kv_tokens / reply_factor", "tokens", f"of prompts, room {says}")
    fleet_hits = curve.hit_tokens(sheet["fleet_tokens"])
    sheet.found("fleet_hit_tokens", fleet_hits, "tokens", f"hits {says}", f"{how}: LRU stack distances")
    formula = "fleet_hit_tokens / ideal_tokens"
    reached = sheet.line("fleet_of_ideal", formula, "", "of the ideal, routed perfectly")
    each_hits = curve.hit_tokens(sheet["fleet_tokens"] / plan.replicas)
    says = "hits of one replica's room alone that sees every request"
    sheet.found("one_hit_tokens", each_hits, "tokens", says, f"{how}: LRU stack distances")
    formula = "one_hit_tokens / ideal_tokens"
    alone = sheet.line("one_of_ideal", formula, "", "of the ideal: about what routing blind to caches gets")
    sheet.conclude(
        f"The ideal hit rate of {trace.name} is {ideal:.1%}. {plan.replicas} replicas, routed perfectly, "
        f"reach {reached:.0%} of it; routing blind to caches, about {alone:.0%} or less."
    )
