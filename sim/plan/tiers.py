"""Tiers: is KV fetched faster than it is computed again, from where, and what does that wear out."""

from math import inf

from sim.plan.cache_curve import cache_curve
from sim.plan.config import TierPlan, TiersPlan
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.traffic_sheet import read_trace_named
from sim.plan.worksheet import Report, Worksheet, identifier

SECONDS_PER_YEAR = 365 * 86_400


def plan_tiers(plan: TiersPlan) -> Report:
    """The finished plan. Raises ``PlanError``. Nothing is left to simulate: a trace is replayed exactly."""
    sheet = Worksheet(plan.kind, plan.title or f"Tiers: {describe(plan.replica)}")
    sheet.section("One replica")
    cost = write_replica(sheet, plan.replica)
    sheet.section("Computing a hit again")
    _recompute(sheet, plan, cost)
    for tier in plan.tiers:
        sheet.section(f"Tier: {tier.name}")
        with sheet.scope(tier.name):
            _tier(sheet, plan, tier, cost)
            _verdict(sheet, plan, tier)
            if tier.endurance_tb is not None:
                _lifetime(sheet, plan, tier)
    keys = ("saved_us", "ratio", "run_min", "sharers")
    rows = [[tier.name, *(f"{identifier(tier.name)}_{key}" for key in keys)] for tier in plan.tiers]
    sheet.section("All tiers")
    columns = [
        ("tier", ""),
        ("saved", "µs/token"),
        ("ratio", ""),
        ("shortest run", "tokens"),
        ("sharers", ""),
    ]
    sheet.grid("Fetching against computing", columns, rows)
    if plan.trace is not None:
        _hits_per_tier(sheet, plan, cost)
    return sheet.done()


def _recompute(sheet: Worksheet, plan: TiersPlan, cost: ReplicaCost) -> None:
    sheet.given("run_tokens", plan.run_tokens, "tokens", "of a hit, one contiguous fetch", "plan")
    formula = "token_us"
    if cost.attention_tokens is not None:
        formula += " * (1 + run_tokens / 2 / attention_tokens)"
    sheet.line("recompute_us", formula, "µs/token", "computing them again, mean over the hit")
    sheet.line("run_gb", "run_tokens * kv_bytes / 1000000000", "GB", "KV of the hit")
    says = "break-even: bandwidth below which fetching loses"
    sheet.line("break_even_gb_per_s", "kv_bytes / recompute_us / 1000", "GB/s", says)
    sheet.conclude(
        f"A hit of {plan.run_tokens:,} tokens is worth fetching above {sheet['break_even_gb_per_s']:.2f} "
        f"GB/s: {cost.kv_bytes:,.0f} bytes a token against {sheet['recompute_us']:.1f} µs to compute it."
    )


def _tier(sheet: Worksheet, plan: TiersPlan, tier: TierPlan, cost: ReplicaCost) -> None:
    sheet.given("gb_per_s", tier.gb_per_s, "GB/s", "read into the GPU", "plan")
    sheet.given("latency_us", tier.latency_us, "µs", "of one fetch", "plan")
    sheet.given("capacity_gb", tier.capacity_gb, "GB", "of one replica's share", "plan")
    sheet.line("capacity_tokens", "capacity_gb * 1000000000 / kv_bytes", "tokens", "that it holds")
    sheet.line("byte_us", "kv_bytes / gb_per_s / 1000", "µs/token", "fetching, bandwidth alone")
    formula = "byte_us + latency_us / run_tokens"
    sheet.line("fetch_us", formula, "µs/token", "fetching, latency spread over the hit")
    sheet.line("saved_us", "recompute_us - fetch_us", "µs/token", "saved by fetching")
    sheet.line("saved_ms", "saved_us * run_tokens / 1000", "ms", "saved per hit")
    says = "computing over fetching: below 1 fetching loses"
    sheet.line("ratio", "recompute_us / fetch_us", "times", says)
    _shortest(sheet, cost)
    says = "replicas reading at once over one link until fetching loses"
    formula = "max(0, floor((recompute_us - latency_us / run_tokens) / byte_us))"
    sheet.line("sharers", formula, "replicas", says)
    if plan.gpu_hour_dollars and tier.dollars_per_month:
        sheet.given("dollars_per_month", tier.dollars_per_month, "dollars", "the tier, a month", "plan")
        sheet.given("gpu_hour_dollars", plan.gpu_hour_dollars, "dollars/h", "one GPU", "plan")
        says = "hits a day that pay for it in GPU time"
        formula = "dollars_per_month / 30 / (saved_ms / 3600000 * gpus * gpu_hour_dollars)"
        if sheet["saved_us"] > 0:
            sheet.line("paying_hits", formula, "hits/day", says)


def _shortest(sheet: Worksheet, cost: ReplicaCost) -> None:
    """The length L at which computing and fetching cost the same.

    Computing costs ``L token_us (1 + L / (2 A))``, fetching ``L byte_us + latency``: longer hits are dearer
    to compute, token by token, but not to fetch.
    """
    says = "shortest hit worth fetching"
    if cost.attention_tokens is not None:
        sheet.line(
            "growth_us", "token_us / (2 * attention_tokens)", "µs/token²", "attention, per token squared"
        )
        formula = "(byte_us - token_us + sqrt((byte_us - token_us) ** 2 + 4 * growth_us * latency_us))"
        sheet.line("run_min", f"{formula} / (2 * growth_us)", "tokens", says)
    elif sheet["token_us"] > sheet["byte_us"]:
        sheet.line("run_min", "latency_us / (token_us - byte_us)", "tokens", says)
    else:
        sheet.found("run_min", inf, "tokens", says, "byte_us is not below token_us: none is long enough")


def _verdict(sheet: Worksheet, plan: TiersPlan, tier: TierPlan) -> None:
    saved, shortest, sharers = sheet["saved_us"], sheet["run_min"], sheet["sharers"]
    if saved <= 0:
        text = (
            f"{tier.name}: should not exist for this model: fetching costs {sheet['fetch_us']:.1f} µs a "
            f"token, computing {sheet['recompute_us']:.1f}"
        )
        text += "." if shortest == inf else f"; it pays only from {shortest:,.0f} tokens on."
    else:
        text = (
            f"{tier.name}: fetch; saves {saved:.1f} of {sheet['recompute_us']:.1f} µs a token. It loses for "
            f"hits shorter than {max(1.0, shortest):,.0f} tokens, and with more than {sharers:g} "
            f"replica{'' if sharers == 1 else 's'} reading over its link at once"
        )
        if tier.shared_by > sharers:
            text += f": {tier.shared_by} share it, so it loses at its worst"
        text += "."
    sheet.note(text)
    sheet.conclude(text)


def _lifetime(sheet: Worksheet, plan: TiersPlan, tier: TierPlan) -> None:
    assert tier.endurance_tb is not None
    sheet.given("endurance_tb", tier.endurance_tb, "TB", "that may be written in its life", "plan")
    sheet.given("write_amplification", tier.write_amplification, "times", "written per byte stored", "plan")
    sheet.given("new_tokens_per_s", plan.new_tokens_per_s, "tokens/s", "computed by one replica", "plan")
    formula = "new_tokens_per_s * kv_bytes * write_amplification / 1000000"
    sheet.line("write_mb_per_s", formula, "MB/s", "if everything computed is written")
    formula = f"endurance_tb * 1000000 / write_mb_per_s / {SECONDS_PER_YEAR}"
    years = sheet.line("years", formula, "years", "that it lasts then")
    sheet.given("lifetime_years", plan.lifetime_years, "years", "that it should last", "plan")
    formula = f"endurance_tb * 1000000 / (lifetime_years * {SECONDS_PER_YEAR})"
    sheet.line("budget_mb_per_s", formula, "MB/s", "write budget")
    admit = sheet.line("admit_share", "min(1, budget_mb_per_s / write_mb_per_s)", "", "of new KV to admit")
    sheet.conclude(
        f"{tier.name} lasts {years:.1f} years if every computed token is written; for "
        f"{plan.lifetime_years:g} years admit {admit:.0%} of them (what is seen a second time, for instance)."
    )


def _hits_per_tier(sheet: Worksheet, plan: TiersPlan, cost: ReplicaCost) -> None:
    assert plan.trace is not None
    trace = read_trace_named(plan.trace, plan.requests)
    curve = cache_curve(trace)
    sheet.section(f"Hits per tier on {trace.name}")
    how = f"replayed: {len(trace.requests)} requests of {trace.name}, LRU stack distances, one replica"
    sheet.note("One replica that sees every request; tiers include the ones before them.")
    sheet.given("prompt_tokens", curve.prompt_tokens, "tokens", "of all prompts", how)
    sheet.given("ideal_tokens", curve.ideal_tokens, "tokens", "that one infinite cache has", how)
    before = "gpu"
    with sheet.scope("gpu"):
        sheet.line("reach_tokens", "kv_tokens", "tokens", "in the GPU's own memory")
        hits = curve.hit_tokens(cost.kv_tokens)
        sheet.found("hit_tokens", hits, "tokens", "hits there", how)
        sheet.line("of_ideal", "hit_tokens / ideal_tokens", "", "of the ideal")
    rows = [["GPU", "gpu_reach_tokens", "gpu_of_ideal", ""]]
    for tier in plan.tiers:
        name = identifier(tier.name)
        with sheet.scope(tier.name):
            formula = f"{before}_reach_tokens + capacity_tokens"
            reach = sheet.line("reach_tokens", formula, "tokens", "in it and all before it")
            more = curve.hit_tokens(reach) - hits
            hits += more
            sheet.found("hit_tokens", more, "tokens", "hits that no nearer tier has", how)
            sheet.line("of_ideal", "hit_tokens / ideal_tokens", "", "of the ideal")
            formula = "hit_tokens * saved_us / 1000000"
            saved = sheet.line("saved_s", formula, "s", "of prefill saved by fetching them")
            if saved < 0:
                sheet.note(f"{tier.name} would cost {-saved:,.0f} s more than computing.")
        rows.append([tier.name, *(f"{name}_{key}" for key in ("reach_tokens", "of_ideal", "saved_s"))])
        before = name
    sheet.grid(
        "What each tier adds",
        [("tier", ""), ("holds, with all before", "tokens"), ("hits, of ideal", ""), ("saves", "s")],
        rows,
    )
