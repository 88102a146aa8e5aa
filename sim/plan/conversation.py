"""A chat of several turns: what is prefilled with a prefix cache, without, and when old turns are trimmed."""

from collections.abc import Iterable
from itertools import chain, count, islice

from replica.sequence import Sequence
from sim.event_queue import EventQueue
from sim.plan.config import ConversationPlan
from sim.plan.replica_cost import ReplicaCost
from sim.plan.worksheet import Report, Worksheet
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica


def plan_conversation(plan: ConversationPlan, *, simulated: bool = True) -> Report:
    """The finished plan; with ``simulated`` a replica's own scheduler and cache run the chat."""
    sheet = Worksheet(plan.kind, plan.title or f"A chat of {plan.turns} turns")
    sheet.section("The chat")
    sheet.given("system_tokens", plan.system_tokens, "tokens", "system prompt", "plan")
    sheet.given("user_tokens", plan.user_tokens, "tokens", "each question", "plan")
    sheet.given("reply_tokens", plan.reply_tokens, "tokens", "each answer", "plan")
    sheet.given("turns", plan.turns, "turns", "of the chat", "plan")
    sheet.given("block_tokens", plan.block_tokens, "tokens", "of a block: only whole ones match", "plan")
    sheet.given("token_us", plan.prefill_us_per_token, "µs/token", "prefill", "plan")
    sheet.section("Turn by turn")
    _turns(sheet, plan)
    sheet.section("All turns")
    _totals(sheet, plan)
    sheet.section("Trimmed: the oldest turn dropped at each new one")
    _trimmed(sheet)
    if simulated:
        sheet.section("Tried on a replica's own cache")
        how = "simulated: the replica's scheduler and prefix cache, one turn after the other"
        computed = simulated_prefill(plan)
        sheet.found("simulated_tokens", sum(computed[:-1]), "tokens", "prefilled in all turns", how)
        says = "prefilled in one more turn, the oldest dropped"
        sheet.found("simulated_trimmed_tokens", computed[-1], "tokens", says, how)
    return sheet.done()


def _turns(sheet: Worksheet, plan: ConversationPlan) -> None:
    sheet.note(
        "The KV of a reply is cached as it is generated, but for its last token: nothing was computed from "
        "that one."
    )
    rows = []
    for turn in range(1, plan.turns + 1):
        with sheet.scope(f"turn_{turn}"):
            formula = f"system_tokens + {turn} * user_tokens + {turn - 1} * reply_tokens"
            sheet.line("prompt", formula, "tokens", "prompt")
            if turn == 1:
                sheet.line("new", "prompt", "tokens", "to prefill: nothing is cached yet")
            else:
                known = f"turn_{turn - 1}_prompt + reply_tokens - 1"
                formula = f"prompt - floor(({known}) / block_tokens) * block_tokens"
                sheet.line("new", formula, "tokens", "to prefill after the whole blocks of the turn before")
            sheet.line("ms", "new * token_us / 1000", "ms", "of prefill")
        rows.append([f"{turn}", f"turn_{turn}_prompt", f"turn_{turn}_new", f"turn_{turn}_ms"])
    columns = [("turn", ""), ("prompt", "tokens"), ("to prefill", "tokens"), ("prefill", "ms")]
    sheet.grid("", columns, rows)


def _totals(sheet: Worksheet, plan: ConversationPlan) -> None:
    every = range(1, plan.turns + 1)
    cold = sheet.line(
        "cold_tokens",
        " + ".join(f"turn_{turn}_prompt" for turn in every),
        "tokens",
        "prefill without a cache",
    )
    warm = sheet.line(
        "warm_tokens", " + ".join(f"turn_{turn}_new" for turn in every), "tokens", "prefill with it"
    )
    sheet.line("cached_share", "1 - warm_tokens / cold_tokens", "", "of prompt tokens cached")
    sheet.line("cold_ms", "cold_tokens * token_us / 1000", "ms", "of prefill without a cache")
    sheet.line("warm_ms", "warm_tokens * token_us / 1000", "ms", "of prefill with it")
    sheet.conclude(
        f"{plan.turns} turns prefill {cold:,.0f} tokens without a prefix cache, {warm:,.0f} with it."
    )


def _trimmed(sheet: Worksheet) -> None:
    says = "prompt that keeps as many turns as the whole chat has"
    formula = "system_tokens + turns * user_tokens + (turns - 1) * reply_tokens"
    sheet.line("trimmed_prompt", formula, "tokens", says)
    says = "still cached: all after the system prompt has moved"
    sheet.line("trimmed_cached", "floor(system_tokens / block_tokens) * block_tokens", "tokens", says)
    trimmed = sheet.line("trimmed_new", "trimmed_prompt - trimmed_cached", "tokens", "to prefill, each turn")
    says = "to prefill in a turn that is not trimmed, mean of those after the first"
    untrimmed = sheet.line("later_new", "(warm_tokens - turn_1_new) / (turns - 1)", "tokens", says)
    sheet.line("trimmed_ms", "trimmed_new * token_us / 1000", "ms", "of prefill, each turn")
    sheet.line("trimmed_times", "trimmed_new / later_new", "times", "as much as untrimmed")
    sheet.conclude(
        f"Kept at that length by dropping the oldest turn, each further turn prefills {trimmed:,.0f} tokens "
        f"in place of {untrimmed:,.0f}: trim rarely and much, several turns at once."
    )


def simulated_prefill(plan: ConversationPlan) -> list[int]:
    """Prompt tokens that a replica computes, by its own scheduler and cache: turn by turn, and in one more
    whose oldest question and answer are dropped.
    """
    queue = EventQueue()
    done: list[Sequence] = []
    events = ReplicaEvents(lambda _: None, done.append, lambda _: None)
    size = plan.block_tokens
    last_prompt = plan.system_tokens + plan.turns * plan.user_tokens + (plan.turns - 1) * plan.reply_tokens
    room = 2 * (-(-(last_prompt + plan.reply_tokens) // size) + 1)
    settings = ReplicaSettings(capacity_tokens=room * size, max_model_len=room * size)
    step = ReplicaCost(step_ms=8.0, fixed_ms=0.0, token_us=plan.prefill_us_per_token, sequence_us=60.0)
    replica = SimulatedReplica(settings.scheduler(size, room), step.step_time(), queue, events)

    def ask(prompt: int, ids: Iterable[int]) -> None:
        full, with_reply = prompt // size, (prompt + plan.reply_tokens) // size
        blocks = list(islice(ids, with_reply))
        replica.accept(
            Sequence.of_blocks(
                f"turn {len(done) + 1}",
                blocks[:full],
                prompt,
                plan.reply_tokens,
                block_size=size,
                output_block_ids=blocks[full:],
            )
        )
        queue.run()

    for turn in range(1, plan.turns + 1):  # block i of the chat is the same in every turn
        ask(plan.system_tokens + turn * plan.user_tokens + (turn - 1) * plan.reply_tokens, count())
    ask(last_prompt, chain(range(plan.system_tokens // size), count(room)))  # all after it has moved
    assert len(done) == plan.turns + 1, "a turn was refused"
    return [sequence.prompt_tokens - sequence.cached_tokens for sequence in done]
