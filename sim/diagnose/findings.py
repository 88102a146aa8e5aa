"""The culprits by name: where, an example, what it costs, what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass

from sim.diagnose.account import SAYS, Cause
from sim.diagnose.capacity import LOSS_SHARE, need
from sim.diagnose.diagnosis import Diagnosis
from sim.diagnose.edits import CHANGING, ChangingLine, ChangingLineLast, ChangingLines
from sim.diagnose.engine_evidence import LOW_SHARE, EngineEvidence
from sim.diagnose.masking import masked, snippet
from sim.diagnose.passages import SortedPassages
from sim.diagnose.prompt_levels import Win

ADVICE = {
    Cause.TRIMMED: "drop old messages rarely and many at once, or never: each drop prefills all that is kept",
    Cause.PASSAGES: "sort retrieved passages by a stable key, such as their id, before the prompt is built",
    Cause.TOOLS: "write tools in one order and with one serialiser (sorted keys)",
    Cause.MODEL: "if the names mean one model, use one; adapters cannot share caches",
    Cause.SALT: "give one salt to all who may share, such as a tenant; none where nobody must be kept apart",
    Cause.TEMPLATE: "look into the chat template for a date or a random id, and compare tokenizer versions; "
    "pass what changes as the last message",
    Cause.BLOCKS: "a smaller KV block size (--block-size), if the kernels allow it",
    Cause.CAPACITY: "more KV memory (larger share of the GPU, an 8-bit KV cache, a host tier) or replicas",
    Cause.ROUTING: "send prompts to the replica that holds their prefix",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One culprit."""

    cause: Cause
    title: str
    tokens: int
    """That mending it would win."""
    requests: int
    evidence: tuple[str, ...]
    """A sentence or a snippet each; secrets masked."""
    advice: str


def findings(diagnosis: Diagnosis) -> list[Finding]:
    """All of them, the dearest first."""
    found = [
        *(_win(diagnosis, win) for win in diagnosis.levels.wins),
        *_template(diagnosis),
        *_blocks(diagnosis),
        *_capacity(diagnosis),
        *_routing(diagnosis),
        *_engine(diagnosis),
    ]
    return sorted(found, key=lambda one: -one.tokens)


def _win(diagnosis: Diagnosis, win: Win) -> Finding:
    edit, cause = win.mended.edit, win.mended.edit.cause
    doc, reach = win.mended.docs[win.best], win.mended.before[win.best]
    at_token = reach.own_bytes * _tokens(diagnosis, win.best) // max(1, doc.own_bytes)
    evidence: list[str] = []
    title = SAYS[cause]
    advice = ADVICE.get(cause, "")
    if cause in (Cause.SALT, Cause.MODEL):
        other = win.mended.after[win.best].earlier
        if other is not None:
            one, another = doc, win.mended.docs[other]
            names = (one.salt, another.salt) if cause is Cause.SALT else (one.model, another.model)
            evidence.append(" and ".join(_short(name, cause) for name in names) + " begin alike")
    elif cause is Cause.TRIMMED:
        start, dropped = edit.apply(win.mended.docs)[win.best].gap
        evidence.append(
            f"a prompt of {_tokens(diagnosis, win.best):,} tokens lost {dropped:,} bytes of older messages "
            f"at byte {start:,}; what follows stood further down in an earlier prompt"
        )
    elif reach.earlier is not None:
        segment = doc.place_of(reach.at)
        where = "the end" if segment is None else segment.place
        text, other_text = doc.text, win.mended.docs[reach.earlier].text
        if isinstance(edit, ChangingLines):
            title = f"{_kind(edit.lines[0], text, reach.at)} in {where}, at token {at_token:,}"
            if len(edit.lines) > 1:
                title += f", and {len(edit.lines) - 1} more behind it"
            advice = (
                "move it to the end of the prompt (the last message), or round it (the day, not the second)"
            )
        elif isinstance(edit, SortedPassages):
            title = f"the same passages in another order, in {where}, from token {at_token:,}"
        else:
            title = f"{title}; from token {at_token:,}"
        evidence += [f"here:    {snippet(text, reach.at)}", f"earlier: {snippet(other_text, reach.at)}"]
    return Finding(cause, title, win.tokens, win.requests, tuple(evidence), advice)


def _tokens(diagnosis: Diagnosis, place: int) -> int:
    """Prompt tokens of the request that arrived at that place."""
    return diagnosis.sample.trace.requests[diagnosis.order[place]].prompt_tokens


def _kind(line: ChangingLine, text: bytes, at: int) -> str:
    """What it is that changes at byte ``at``."""
    if isinstance(line, ChangingLineLast):
        return "a line that changes"
    around = next((one for one in CHANGING.finditer(text, max(0, at - 40)) if one.end() > at), None)
    value = b"" if around is None else around.group()
    if b":" in value or value.count(b"-") == 2 or (value[:1].isalpha() and value.isalpha()):
        return "a date or time"
    if value.count(b"-") == 4:
        return "a UUID"
    if any(byte in b"abcdefABCDEF" for byte in value):
        return "a random id"
    return "a number or counter"


def _short(name: str, cause: Cause) -> str:
    if not name:
        return "requests without one"
    return f"{name[:2]}***" if cause is Cause.SALT else masked(name)[:40]


def _template(diagnosis: Diagnosis) -> Iterator[Finding]:
    levels = diagnosis.levels
    if not levels.drifted or levels.drift_best is None:
        return
    place = levels.drift_best
    reach, shared = levels.reach[place], levels.shared[place]
    agrees = reach.own_bytes * _tokens(diagnosis, place) // max(1, levels.docs[place].own_bytes)
    evidence = f"two prompts whose text agrees for about {agrees:,} tokens share {shared:,} token ids"
    yield Finding(
        Cause.TEMPLATE,
        f"equal text, other tokens, from token {shared:,}",
        diagnosis.account.tokens(Cause.TEMPLATE),
        levels.drifted,
        (evidence,),
        ADVICE[Cause.TEMPLATE],
    )


def _blocks(diagnosis: Diagnosis) -> Iterator[Finding]:
    lost = diagnosis.account.tokens(Cause.BLOCKS)
    if lost > LOSS_SHARE * diagnosis.account.prompt_tokens:
        size = diagnosis.sample.trace.block_tokens
        yield Finding(
            Cause.BLOCKS,
            f"blocks of {size} tokens: what ends inside one is not matched",
            lost,
            diagnosis.requests,
            (f"{lost / max(1, diagnosis.requests):,.0f} tokens a request",),
            ADVICE[Cause.BLOCKS],
        )


def _capacity(diagnosis: Diagnosis) -> Iterator[Finding]:
    lost = diagnosis.account.tokens(Cause.CAPACITY)
    if lost <= LOSS_SHARE * diagnosis.account.prompt_tokens:
        return
    found = need(
        diagnosis.distances,
        diagnosis.sample.trace.block_tokens,
        diagnosis.replica_tokens,
        diagnosis.capacity_tokens,
    )
    evidence = [
        f"{share:.0%} of what an infinite cache has takes {tokens:,} tokens of cache; "
        f"the fleet has {diagnosis.capacity_tokens:,}"
        for share, tokens in found.needed
    ]
    title = "reused blocks are evicted first"
    if found.churns:
        title = "LRU churn: the working set is just above the cache"
        evidence.insert(
            0, f"a quarter more cache would win back {found.churn_won:,} of {found.lost:,} tokens"
        )
    yield Finding(Cause.CAPACITY, title, lost, diagnosis.requests, tuple(evidence), ADVICE[Cause.CAPACITY])


def _routing(diagnosis: Diagnosis) -> Iterator[Finding]:
    lost = diagnosis.account.tokens(Cause.ROUTING)
    if lost <= LOSS_SHARE * diagnosis.account.prompt_tokens:
        return
    best = max(diagnosis.policies, key=lambda policy: diagnosis.simulated_tokens[policy])
    there = diagnosis.as_routed_tokens
    if there is None:
        there = diagnosis.simulated_tokens[diagnosis.policies[0]]
    share = diagnosis.account.share
    evidence = [
        f"{best} would have cached {share(diagnosis.simulated_tokens[best]):.1%}, simulated with this "
        "router's own code"
    ]
    if diagnosis.as_routed_tokens is not None:
        evidence.append(f"where the log says requests went, caches of this size had {share(there):.1%}")
    won = diagnosis.simulated_tokens[best] - there
    advice = f"{ADVICE[Cause.ROUTING]}: {best} wins {won:,} of these tokens"
    known = diagnosis.sample.policies
    if diagnosis.as_routed_tokens is not None and not known:
        advice += f", if the log is not of {best} already"
    if known == (best,):
        advice = (
            f"the log is of {best} already, so no other policy: its replicas were busier or smaller than the "
            "simulated ones (--capacity, --step-time), or routers did not share what they knew (state); "
            "`warmroute explain` and the reasons in /decisions tell why a request left the warm one"
        )
    elif won <= 0:
        advice = (
            f"what {best} leaves: another replica chosen because the warm one was busy, or a prefix "
            "computed on two at once; try others with --policy A,B"
        )
    yield Finding(
        Cause.ROUTING,
        "prefixes are computed on more than one replica",
        lost,
        diagnosis.requests,
        tuple(evidence),
        advice,
    )


def _engine(diagnosis: Diagnosis) -> Iterator[Finding]:
    lost, found = diagnosis.account.tokens(Cause.ENGINE), diagnosis.engine
    if found is None or lost <= LOSS_SHARE * diagnosis.account.prompt_tokens:
        return
    reported = sum(one.reported for one in found.replicas)
    evidence = [
        f"log line {one.line}, {one.replica}: {one.expected:,} of {one.prompt_tokens:,} tokens expected, "
        f"{one.reported:,} reported"
        + ("" if one.matched is None else f", {one.matched:,} believed by the router")
        for one in found.examples
    ]
    yield Finding(
        Cause.ENGINE,
        "replicas report fewer hits than caches fed like this have",
        lost,
        sum(one.requests for one in found.replicas),
        tuple(evidence),
        _engine_advice(found, reported),
    )


def _engine_advice(found: EngineEvidence, reported: int) -> str:
    if not reported:
        return (
            "no replica reported a hit: is prefix caching on, and does the engine tell "
            "(vLLM: --enable-prompt-tokens-details)?"
        )
    low = [one.replica for one in found.replicas if one.reported < LOW_SHARE * one.expected]
    if low and len(low) < len(found.replicas):
        return (
            f"only {', '.join(low)} fall short: restarted, less KV memory, or another template or tokenizer?"
        )
    silent = sum(one.silent for one in found.replicas)
    if silent:
        return (
            f"{silent} requests hit nothing at all: compare their token ids with an earlier one's "
            "(prompt_token_ids in the log): a template that writes the date, an adapter, a salt"
        )
    return "hits end early: less KV memory than --capacity says, or blocks of another size"
