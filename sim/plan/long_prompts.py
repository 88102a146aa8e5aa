"""Long cold prompts: does one fit the target at all, how warm must traffic be, two pools for the rest."""

from dataclasses import replace

from sim.plan.config import LongPromptsPlan, NumbersTraffic, SloPlan
from sim.plan.queueing import most_offered, smallest_pool
from sim.plan.replica_cost import ReplicaCost
from sim.plan.replica_sheet import describe, write_replica
from sim.plan.trials import Trial, conclude_hit_rate, write_trial
from sim.plan.worksheet import Report, Worksheet
from sim.simulate import Progress


def plan_long_prompts(
    plan: LongPromptsPlan, *, simulated: bool = True, progress: Progress | None = None
) -> Report:
    """The finished plan; with ``simulated`` both pools are tried. Raises ``PlanError``."""
    sheet = Worksheet(plan.kind, plan.title or f"Long prompts: {describe(plan.replica)}")
    sheet.section("What is asked")
    _asked(sheet, plan)
    sheet.section("A cold prompt on all GPUs at once")
    with sheet.scope("all"):
        whole = write_replica(sheet, plan.replica)
        sheet.line("cold_ms", whole.prefill_formula("prompt_tokens"), "ms", "prefill, nothing waiting")
    _verdict(sheet, "all", plan.replica.gpus, plan.ttft_target_ms)
    sheet.section("A cold prompt on one prefill replica")
    with sheet.scope("prefill"):
        prefill = write_replica(sheet, plan.replica.model_copy(update={"gpus": plan.prefill_gpus}))
        sheet.line("cold_ms", prefill.prefill_formula("prompt_tokens"), "ms", "prefill, nothing waiting")
    _verdict(sheet, "prefill", plan.prefill_gpus, plan.ttft_target_ms)
    sheet.section("How warm traffic must be")
    _warmth(sheet, plan, prefill)
    sheet.section("The prefill pool")
    _prefill_pool(sheet)
    sheet.section("The decode pool")
    decode = prefill
    with sheet.scope("decode"):
        if plan.decode_gpus == plan.prefill_gpus:
            _same_replica(sheet)
        else:
            decode = write_replica(sheet, plan.replica.model_copy(update={"gpus": plan.decode_gpus}))
    if not _decode_pool(sheet, plan, decode):
        return sheet.done()
    sheet.section("Both pools")
    _both(sheet, plan)
    if plan.simulate is not None and simulated:
        _trials(sheet, plan, prefill, decode, progress)
    return sheet.done()


def _asked(sheet: Worksheet, plan: LongPromptsPlan) -> None:
    sheet.given("requests_per_s", plan.requests_per_s, "requests/s", "arrivals", "plan")
    sheet.given("prompt_tokens", plan.prompt_tokens, "tokens", "prompt", "plan")
    sheet.given("shared_tokens", plan.shared_tokens, "tokens", "of it cached in a warm request", "plan")
    sheet.given("warm_share", plan.warm_share, "", "of requests are warm", "plan")
    sheet.given("prefixes", plan.prefixes, "", "different documents asked about in turn", "plan")
    sheet.given("output_tokens", plan.output_tokens, "tokens", "reply", "plan")
    sheet.given("target_ms", plan.ttft_target_ms, "ms", "arrival to first token", "plan")
    sheet.given("tpot_target_ms", plan.tpot_ms, "ms", "per token after the first", "plan")
    sheet.given("in_time_share", plan.in_time_share, "", "of requests must not wait longer", "plan")
    sheet.given("max_utilization", plan.max_utilization, "", "ceiling whatever latency allows", "plan")


def _verdict(sheet: Worksheet, scope: str, gpus: int, target_ms: float) -> None:
    cold_ms = sheet[f"{scope}_cold_ms"]
    fits = cold_ms <= target_ms
    text = (
        f"A cold prompt takes {cold_ms:,.0f} ms on {gpus} GPUs: it "
        f"{'fits' if fits else 'does not fit'} the target of {target_ms:,.0f} ms"
        f"{', before any queueing' if fits else ', even with nothing waiting'}."
    )
    sheet.note(text)
    sheet.conclude(text)


def _warmth(sheet: Worksheet, plan: LongPromptsPlan, cost: ReplicaCost) -> None:
    sheet.given("queue_share", plan.queue_share, "", "of the target kept for waiting", "plan")
    sheet.line("queue_ms", "target_ms * queue_share", "ms", "a request may wait")
    says = "from a prefill replica to a decode replica"
    sheet.given("transfer_gb_per_s", plan.transfer_gb_per_s, "GB/s", says, "plan")
    formula = "prompt_tokens * prefill_kv_bytes / transfer_gb_per_s / 1000000"
    sheet.line("transfer_ms", formula, "ms", "moving the prompt's KV")
    says = "left for the prefill itself"
    budget_ms = sheet.line("budget_ms", "target_ms - queue_ms - transfer_ms", "ms", says)
    if budget_ms <= 0:
        sheet.found("new_max", 0.0, "tokens", "that may be new", "nothing is left for prefill")
    elif sheet["prefill_cold_ms"] <= budget_ms:
        how = "a cold prompt fits into the budget"
        sheet.found("new_max", plan.prompt_tokens, "tokens", "that may be new", how)
    else:
        formula = "(budget_ms - prefill_fixed_ms) * 1000 / prefill_token_us"
        if cost.attention_tokens is not None:
            reach = "prefill_attention_tokens + prompt_tokens"
            formula = f"{reach} - sqrt(({reach}) ** 2 - 2 * prefill_attention_tokens * {formula})"
        says = "new tokens that fit, at the end of the prompt: the prefill formula solved for them"
        sheet.line("new_max", formula, "tokens", says)
    needed = sheet.line(
        "warm_needed", "1 - new_max / prompt_tokens", "", "of a prompt must come from the cache"
    )
    sheet.line("warm_is", "shared_tokens / prompt_tokens", "", "of a warm prompt does")
    sheet.conclude(
        f"With {plan.queue_share:.0%} of the target kept for waiting, {needed:.0%} of a prompt must come "
        f"from the cache; of a warm prompt {sheet['warm_is']:.0%} does."
    )
    if sheet["prefill_cold_ms"] > plan.ttft_target_ms and plan.warm_share < 1:
        sheet.conclude(
            f"Cold requests, {1 - plan.warm_share:.0%} of them, miss the target on a prefill replica, "
            "whatever the load."
        )
    with sheet.scope("prefill"):
        sheet.line("new_tokens", "prompt_tokens - shared_tokens", "tokens", "of a warm prompt to prefill")
        formula = cost.prefill_formula("new_tokens", "shared_tokens")
        sheet.line("warm_ms", formula, "ms", "prefill of a warm prompt")
    formula = "prefill_warm_ms + transfer_ms"
    sheet.line("warm_ttft_ms", formula, "ms", "first token of a warm prompt, nothing waiting")


def _prefill_pool(sheet: Worksheet) -> None:
    formula = "warm_share * prefill_warm_ms + (1 - warm_share) * prefill_cold_ms"
    sheet.line("prefill_ms", formula, "ms", "prefill of a request, mean")
    formula = (
        "(warm_share * prefill_warm_ms ** 2 + (1 - warm_share) * prefill_cold_ms ** 2) / (2 * prefill_ms)"
    )
    sheet.line("residual_ms", formula, "ms", "mean remaining work of a prefill that is met")
    says = "busy with prefill, mean"
    offered = sheet.line("prefill_work", "requests_per_s * prefill_ms / 1000", "replicas", says)
    late = 1.0 - sheet["in_time_share"]
    says = "for waits within queue_ms, work dealt out perfectly (one queue for all)"
    fewest = smallest_pool(offered, sheet["queue_ms"], sheet["residual_ms"], late)
    how = "fewest at which late_share is at most 1 - in_time_share"
    sheet.found("replicas_queue", fewest, "replicas", says, how)
    tail = "exp(-queue_ms * (replicas_queue - prefill_work) / residual_ms)"
    says = "of requests then wait longer"
    sheet.line("late_share", f"erlang_c(replicas_queue, prefill_work) * {tail}", "", says)
    formula = "max(replicas_queue, ceil(prefill_work / max_utilization))"
    sheet.line("prefill_replicas", formula, "replicas", "in the prefill pool")
    says = "that the warm prefixes take"
    need = sheet.line("prefix_tokens", "prefixes * shared_tokens", "tokens", says)
    formula = "prefill_replicas * prefill_kv_tokens"
    room = sheet.line("cache_tokens", formula, "tokens", "room for them in the prefill pool")
    if need > room:
        text = (
            f"The prefixes take {need:,.0f} tokens, the prefill pool holds {room:,.0f}: so many warm "
            "requests cannot be had without a tier behind it; plan with a smaller warm_share."
        )
        sheet.note(text)
        sheet.conclude(text)


def _same_replica(sheet: Worksheet) -> None:
    same = (
        ("step_ms", "ms", "a decode step, whatever is in it"),
        ("fixed_ms", "ms", "of a step, beside reading the weights"),
        ("context_ns", "ns", "reading one token of a sequence's context"),
        ("sequence_us", "µs", "a decode step longer by this per sequence, its KV apart"),
        ("math_us", "µs", "math of one token"),
        ("kv_tokens", "tokens", "room for KV"),
    )
    for name, unit, says in same:
        sheet.line(name, f"prefill_{name}", unit, f"as a prefill replica: {says}")


def _decode_pool(sheet: Worksheet, plan: LongPromptsPlan, cost: ReplicaCost) -> bool:
    context = "(prompt_tokens + output_tokens / 2) * decode_context_ns / 1000"
    formula = f"(decode_sequence_us + {context}) / 1000"
    sheet.line("sequence_ms", formula, "ms", "a step longer by this per sequence: its KV is read")
    formula = "decode_kv_tokens / (prompt_tokens + output_tokens)"
    fits = sheet.line("batch_kv", formula, "sequences", "that fit into memory")
    formula = "(tpot_target_ms - decode_step_ms) / sequence_ms"
    quick = sheet.line("batch_tpot", formula, "sequences", "that keep the promise per token")
    if min(fits, quick) < 1:
        sheet.conclude(
            f"A decode replica of {plan.decode_gpus} GPUs holds {fits:.1f} such sequences and serves "
            f"{quick:.1f} in time: give it more GPUs, or fewer bits per weight or KV element."
        )
        return False
    sheet.given("max_running", cost.max_running, "", "sequences in a batch, at most", "plan")
    sheet.line("batch", "floor(min(batch_kv, batch_tpot, max_running))", "sequences", "of a full replica")
    formula = "max(decode_step_ms, decode_fixed_ms + batch * decode_math_us / 1000) + batch * sequence_ms"
    sheet.line("full_step_ms", formula, "ms", "a step of a full replica")
    sheet.line("decode_tps", "batch / full_step_ms * 1000", "tokens/s", "of a full replica")
    says = "arriving in a second"
    sheet.line("decode_work", "requests_per_s * output_tokens / decode_tps", "replicas", says)
    formula = "ceil(decode_work / max_utilization)"
    sheet.line("decode_replicas", formula, "replicas", "in the decode pool")
    sheet.line("each_tps", "requests_per_s * output_tokens / decode_replicas", "tokens/s", "of one replica")
    says = "sequences that decode at once in one, by Little's law"
    formula = "each_tps * decode_step_ms / 1000 / (1 - each_tps * sequence_ms / 1000)"
    sheet.line("decoding", formula, "sequences", says)
    sheet.line("tpot_ms", "decode_step_ms + decoding * sequence_ms", "ms", "per token, mean")
    return True


def _both(sheet: Worksheet, plan: LongPromptsPlan) -> None:
    sheet.given("have_gpus", plan.replica.gpus, "GPUs", "there are", "plan")
    sheet.given("prefill_each", plan.prefill_gpus, "GPUs", "of a prefill replica", "plan")
    sheet.given("decode_each", plan.decode_gpus, "GPUs", "of a decode replica", "plan")
    formula = "prefill_replicas * prefill_each + decode_replicas * decode_each"
    need = sheet.line("need_gpus", formula, "GPUs", "both pools")
    if plan.gpu_hour_dollars:
        sheet.given("gpu_hour_dollars", plan.gpu_hour_dollars, "dollars/h", "one GPU", "plan")
        sheet.line("dollars_h", "need_gpus * gpu_hour_dollars", "dollars/h", "both pools")
    says = "a stream would stall so long beside each chunk of a prefill, were the pools one"
    sheet.given("chunk_tokens", plan.replica.max_batched_tokens, "tokens", "of a prefill in a step", "plan")
    sheet.line("stall_ms", "chunk_tokens * prefill_token_us / 1000", "ms", says)
    rows, best = [], 0.0
    for count in range(1, (plan.replica.gpus - plan.decode_gpus) // plan.prefill_gpus + 1):
        rest = (plan.replica.gpus - count * plan.prefill_gpus) // plan.decode_gpus
        with sheet.scope(f"split_{count}"):
            says = "requests/s that prefill replicas carry"
            how = f"{count} prefill replicas of {plan.prefill_gpus} GPUs"
            sheet.given("prefills", count, "replicas", "prefill", how)
            sheet.given("decodes", rest, "replicas", "decode", "on the GPUs that are left")
            most = most_offered(count, sheet["queue_ms"], sheet["residual_ms"], 1.0 - plan.in_time_share)
            busy = "of them may be busy, mean, for waits within queue_ms"
            sheet.found(
                "prefill_busy", most, "replicas", busy, "largest at which late_share keeps in_time_share"
            )
            formula = "min(prefill_busy, prefills * max_utilization) / prefill_ms * 1000"
            sheet.line("prefill_rate", formula, "requests/s", says)
            formula = "decodes * max_utilization * decode_tps / output_tokens"
            sheet.line("decode_rate", formula, "requests/s", "requests/s that decode replicas carry")
            best = max(best, sheet.line("rate", "min(prefill_rate, decode_rate)", "requests/s", "carried"))
        keys = ("prefills", "decodes", "prefill_rate", "decode_rate", "rate")
        rows.append([f"{count} + {rest}", *(f"split_{count}_{key}" for key in keys)])
    header = ("prefill", ""), ("decode", ""), ("prefill carries", "requests/s")
    columns = [("split", ""), *header, ("decode carries", "requests/s"), ("both", "requests/s")]
    sheet.grid(f"Splits of {plan.replica.gpus} GPUs", columns, rows)
    enough = "enough" if need <= plan.replica.gpus else "too few"
    prefills, decodes = sheet["prefill_replicas"], sheet["decode_replicas"]
    sheet.conclude(
        f"{plan.requests_per_s:g} requests/s need {prefills:g} x {plan.prefill_gpus} GPUs for prefill and "
        f"{decodes:g} x {plan.decode_gpus} for decode: {need:g} GPUs; {plan.replica.gpus} are {enough}. The "
        f"best split of them carries {best:.2f} requests/s."
    )


_PREFILL_KEYS = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "hit_rate")


def _trials(
    sheet: Worksheet,
    plan: LongPromptsPlan,
    prefill: ReplicaCost,
    decode: ReplicaCost,
    progress: Progress | None,
) -> None:
    """Each pool by itself: prefill with replies of one token, decode with prompts that cost nothing."""
    assert plan.simulate is not None
    traffic = NumbersTraffic(
        kind="numbers",
        requests_per_s=plan.requests_per_s,
        prompt_tokens=plan.prompt_tokens,
        shared_tokens=plan.shared_tokens,
        warm_share=plan.warm_share,
        prefixes=plan.prefixes,
        zipf=plan.zipf,
        output_tokens=1,
        spread=0.0,
    )
    slo = SloPlan(ttft_ms=plan.ttft_target_ms, tpot_ms=plan.tpot_ms)
    pool = Trial.of(plan.simulate, traffic, slo, prefill, None, progress)
    write_trial(sheet, pool, int(sheet["prefill_replicas"]), "Prefill pool, tried", "prefill", _PREFILL_KEYS)
    conclude_hit_rate(sheet, "warm_share * shared_tokens / prompt_tokens", "prefill_simulated_hit_rate")
    sheet.line(
        "shown_ttft_ms", "prefill_simulated_ttft_mean_ms + transfer_ms", "ms", "first token at the user, mean"
    )
    free = replace(decode, token_us=0.0, fixed_ms=0.0, attention_tokens=None, roofline=None)
    traffic = traffic.model_copy(update={"output_tokens": plan.output_tokens})
    pool = Trial.of(
        plan.simulate.model_copy(update={"policy": "least_loaded"}), traffic, slo, free, None, progress
    )
    write_trial(sheet, pool, int(sheet["decode_replicas"]), "Decode pool, tried", "decode", ("tpot_mean_ms",))
