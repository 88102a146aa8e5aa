"""Hybrid models: what a recurrent state takes beside KV, and how far apart its checkpoints should stand.

KV of a prefix can be cut at every block. A recurrent state exists only where it was saved: a prompt continues
from the last checkpoint before the place where it leaves what is cached, and computes the rest again.
"""

from replica.contract.roofline.model_shape import RecurrentState
from sim.plan.config import HybridPlan
from sim.plan.plan_error import PlanError
from sim.plan.replica_parts import model_shape
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.worksheet import Report, Worksheet


def plan_hybrid(plan: HybridPlan) -> Report:
    """The finished plan. Raises ``PlanError``. Nothing is simulated: that cache has no recurrent states."""
    shape = model_shape(plan.replica)
    if shape.state is None:
        raise PlanError(
            f"replica.model {shape.name} has no recurrent layers; expected a model with a state, such as "
            "qwen3-next-80b-a3b, or sizes with `state:`"
        )
    sheet = Worksheet(plan.kind, plan.title or f"Hybrid: {describe(plan.replica)}")
    sheet.section("One replica")
    write_replica(sheet, plan.replica)
    sheet.section("What it keeps")
    _inventory(sheet, shape.state, shape.source)
    sheet.section("A live request")
    _request(sheet, plan)
    sheet.section("Checkpoints")
    _checkpoints(sheet, plan)
    return sheet.done()


def _inventory(sheet: Worksheet, state: RecurrentState, source: str) -> None:
    sheet.given("state_layers", state.layers, "layers", "with a recurrent state", source)
    sheet.given("state_heads", state.heads, "", "heads in each", source)
    sheet.given("key_dim", state.key_dim, "", "columns of a head's state", source)
    sheet.given("value_dim", state.value_dim, "", "rows of it", source)
    sheet.given("state_bits", state.state_bits, "bits", "of an element", "usual: kept in fp32")
    sheet.given("conv_channels", state.conv_channels, "", "channels of the short convolution", source)
    sheet.given("conv_kernel", state.conv_kernel, "", "its width: one input less is kept", source)
    sheet.given("conv_bits", state.conv_bits, "bits", "of an element", "usual")
    formula = "state_heads * key_dim * value_dim * state_bits / 8"
    sheet.line("recurrent_bytes", formula, "bytes", "recurrent state of one layer")
    formula = "conv_channels * (conv_kernel - 1) * conv_bits / 8"
    sheet.line("conv_bytes", formula, "bytes", "convolution state of one layer")
    formula = "state_layers * (recurrent_bytes + conv_bytes) / 1000000"
    sheet.line("state_mb", formula, "MB", "of one sequence, however long; of one checkpoint, too")
    says = "whose KV takes as much as one state"
    sheet.line("state_tokens", "state_mb * 1000000 / kv_bytes", "tokens", says)


def _request(sheet: Worksheet, plan: HybridPlan) -> None:
    sheet.given("context_tokens", plan.context_tokens, "tokens", "prompt and reply", "plan")
    sheet.line("request_kv_mb", "context_tokens * kv_bytes / 1000000", "MB", "KV")
    sheet.line("request_mb", "request_kv_mb + state_mb", "MB", "KV and state of a live request")
    live = sheet.line("live", "kv_gb * 1000 / request_mb", "requests", "that fit at once, nothing cached")
    formula = "(full_layers + state_layers) * kv_elements * kv_bits / 8"
    sheet.line("twin_kv_bytes", formula, "bytes/token", "KV, were every layer full attention")
    formula = "context_tokens * twin_kv_bytes / 1000000 / request_mb"
    twin = sheet.line("twin_times", formula, "times", "the memory of a request then")
    sheet.conclude(
        f"A live request of {plan.context_tokens:,} tokens takes {sheet['request_mb']:,.0f} MB, "
        f"{sheet['state_mb']:.1f} of them state; {live:,.0f} fit at once. With full attention everywhere it "
        f"would take {twin:.1f} times as much."
    )


def _checkpoints(sheet: Worksheet, plan: HybridPlan) -> None:
    sheet.given("turn_tokens", plan.turn_tokens, "tokens", "of a turn", "plan")
    rows = []
    for spacing in plan.spacings:
        name = f"at_{spacing}"
        with sheet.scope(name):
            sheet.given("spacing", spacing, "tokens", "between checkpoints", "plan")
            says = "computed again per hit, mean, if prompts leave anywhere"
            sheet.line("lost_tokens", "spacing / 2", "tokens", says)
            _spaced(sheet)
        rows.append([f"every {spacing:,}", *(f"{name}_{key}" for key in _KEYS)])
    where = "checkpoints stand where later requests continue"
    for title, name, spacing_name, says in (
        ("every turn's end", "at_turns", "turn_tokens", "one where each turn ends"),
        ("the last turn's end", "at_last", "context_tokens", "one per conversation, where it ends"),
    ):
        with sheet.scope(name):
            sheet.line("spacing", spacing_name, "tokens", f"between checkpoints: {says}")
            sheet.given("lost_tokens", 0, "tokens", "computed again per hit", where)
            _spaced(sheet)
        rows.append([title, *(f"{name}_{key}" for key in _KEYS)])
    columns = [("checkpoint", ""), ("lost per hit", "tokens"), ("", "ms"), ("cached token", "bytes")]
    sheet.grid("Spacing", [*columns, ("cache holds", "tokens"), ("checkpoints", "")], rows)
    says = "spacing at which checkpoints take as much as KV; closer, they crowd out what they are for"
    even = sheet.line("even_spacing", "state_tokens", "tokens", says)
    says = "memory of checkpoints over KV, were there one at every block of 16"
    times = sheet.line("every_block_times", "state_tokens / 16", "times", says)
    sheet.conclude(
        f"One checkpoint takes as much as {even:,.0f} tokens of KV: one per block of 16 would take "
        f"{times:,.0f} times the KV. Keep one where the last turn ends "
        f"({sheet['at_last_checkpoint_share']:.0%} of the cache) and one at the end of each shared prompt; "
        "at fixed distances no closer than that."
    )


_KEYS = ("lost_tokens", "lost_ms", "token_bytes", "cached_tokens", "checkpoint_share")


def _spaced(sheet: Worksheet) -> None:
    sheet.line("lost_ms", "lost_tokens * token_us / 1000", "ms", "of prefill per hit")
    formula = "kv_bytes + state_mb * 1000000 / spacing"
    sheet.line("token_bytes", formula, "bytes", "of a cached token, its share of checkpoints included")
    says = "that the replica's room caches"
    sheet.line("cached_tokens", "kv_gb * 1000000000 / token_bytes", "tokens", says)
    sheet.line("checkpoint_share", "1 - kv_bytes / token_bytes", "", "of the cache are checkpoints")
