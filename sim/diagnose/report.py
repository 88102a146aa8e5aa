"""A diagnosis as verdict, tables and findings: what terminal, plain text, JSON and HTML are made from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sim.diagnose.account import PROMPT_CAUSES, Cause, says
from sim.diagnose.capacity import need
from sim.diagnose.diagnosis import Diagnosis
from sim.diagnose.divergence import BUCKETS
from sim.diagnose.findings import Finding, findings


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Text in rows; the first column is a label."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[float, ...] = ()
    """Per row, a share from 0 to 1 to be drawn where pictures can be."""
    heat: bool = False
    """A histogram in every row: figures are shaded by their share of the row where that can be."""


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """Everything that is said."""

    title: str
    verdict: tuple[str, ...]
    tables: tuple[ReportTable, ...]
    findings: tuple[tuple[str, tuple[str, ...]], ...]
    """(headline, lines) of each culprit, the dearest first."""

    def json_object(self) -> dict[str, Any]:
        """What is said, for programs."""
        return {
            "title": self.title,
            "verdict": list(self.verdict),
            "tables": [
                {
                    "title": table.title,
                    "rows": [dict(zip(table.columns, row, strict=True)) for row in table.rows],
                }
                for table in self.tables
            ],
            "findings": [{"title": headline, "lines": list(lines)} for headline, lines in self.findings],
        }


def report(diagnosis: Diagnosis, dollars_per_hour: float) -> DiagnosisReport:
    """Written from the figures. ``dollars_per_hour`` is the price of one replica."""
    trace = diagnosis.sample.trace
    title = (
        f"{trace.name}: {diagnosis.requests:,} of {len(trace.requests):,} requests counted, "
        f"{diagnosis.account.prompt_tokens:,} prompt tokens (lengths {diagnosis.sample.lengths}), "
        f"{diagnosis.replicas} replicas of {diagnosis.replica_tokens:,} KV tokens"
        f"{' (assumed)' if diagnosis.assumed else ''}"
    )
    tables = [_shares(diagnosis), _account(diagnosis), _distances(diagnosis), *_divergence(diagnosis)]
    found = findings(diagnosis)
    return DiagnosisReport(
        title,
        tuple(_verdict(diagnosis)),
        tuple(table for table in tables if table.rows),
        tuple((_headline(one, diagnosis), tuple(_lines(one, diagnosis, dollars_per_hour))) for one in found),
    )


def _levels(diagnosis: Diagnosis) -> Iterator[tuple[str, int, str]]:
    """(name, cached tokens, what it is) from the top."""
    won = sum(diagnosis.account.tokens(cause) for cause in PROMPT_CAUSES)
    if won > 0:
        blocks = diagnosis.account.tokens(Cause.BLOCKS) + diagnosis.account.tokens(Cause.TEMPLATE)
        yield "mended prompts", diagnosis.ideal_tokens + won + blocks, "infinite cache, token by token"
    yield "ideal", diagnosis.ideal_tokens, "one infinite cache that sees every request"
    yield "pooled", diagnosis.pooled_tokens, f"one LRU cache of {diagnosis.capacity_tokens:,} tokens"
    for policy in diagnosis.policies:
        yield policy, diagnosis.simulated_tokens[policy], f"simulated on {diagnosis.replicas} replicas"
    if diagnosis.as_routed_tokens is not None:
        yield "as routed", diagnosis.as_routed_tokens, "one LRU cache per replica, routed as the log says"
    if diagnosis.measured_tokens is not None:
        yield "measured", diagnosis.measured_tokens, "reported by the replicas"


def _shares(diagnosis: Diagnosis) -> ReportTable:
    share = diagnosis.account.share
    levels = list(_levels(diagnosis))
    return ReportTable(
        "Cached share of prompt tokens",
        ("with", "share", "tokens", "what it is"),
        tuple((name, f"{share(tokens):.1%}", f"{tokens:,}", says) for name, tokens, says in levels),
        tuple(share(tokens) for _, tokens, _ in levels),
    )


def _account(diagnosis: Diagnosis) -> ReportTable:
    account = diagnosis.account
    rows = [("cached", account.cached_tokens, "as measured, else as simulated")]
    rows += [(cause.value, tokens, says(cause, tokens)) for cause, tokens in reversed(account.lost) if tokens]
    rows.append(("prompt tokens", account.prompt_tokens, "the sum of the above"))
    return ReportTable(
        "Where every prompt token went",
        ("cause", "tokens", "share", "what it is"),
        tuple((name, f"{tokens:,}", f"{account.share(tokens):z.1%}", text) for name, tokens, text in rows),
        tuple(max(0.0, account.share(tokens)) for _, tokens, _ in rows),
    )


def _distances(diagnosis: Diagnosis) -> ReportTable:
    found = need(
        diagnosis.distances,
        diagnosis.sample.trace.block_tokens,
        diagnosis.replica_tokens,
        diagnosis.capacity_tokens,
    )
    everything = sum(tokens for _, _, tokens in found.bands)
    last = max((place for place, (_, _, tokens) in enumerate(found.bands) if tokens), default=-1)
    rows = found.bands[: last + 1]
    return ReportTable(
        "Reuse distance: cache that must lie between two uses of a block",
        ("within", "cache tokens", "tokens reused", "share"),
        tuple(
            (name, f"{edge:,}", f"{tokens:,}", f"{tokens / everything:.1%}") for name, edge, tokens in rows
        ),
        tuple(tokens / everything for _, _, tokens in rows),
    )


def _divergence(diagnosis: Diagnosis) -> Iterator[ReportTable]:
    rows = []
    for app in diagnosis.apps:
        for against, counts in (("the one before", app.previous), ("the most similar", app.similar)):
            rows.append((app.app, against, *(f"{count:,}" if count else "" for count in counts)))
    yield ReportTable(
        "First difference from an earlier request of the same app: requests by token",
        ("app", "against", *BUCKETS),
        tuple(rows),
        heat=True,
    )
    yield ReportTable(
        "Where requests part from the one before",
        ("app", "in", "requests", "median token", "here", "there"),
        tuple(
            (app.app, place.where, f"{place.requests:,}", f"{place.token:,}", place.here, place.there)
            for app in diagnosis.apps
            for place in app.places
        ),
    )


def _verdict(diagnosis: Diagnosis) -> Iterator[str]:
    account = diagnosis.account
    share = account.share
    what = "measured" if diagnosis.measured_tokens is not None else f"with {diagnosis.policies[0]}, simulated"
    yield (
        f"{share(account.cached_tokens):.1%} of prompt tokens were cached ({what}); one infinite cache that "
        f"sees every request would have had {share(diagnosis.ideal_tokens):.1%}."
    )
    parts = [
        (cause.value, 100 * share(tokens))
        for cause, tokens in account.lost
        if cause in (Cause.CAPACITY, Cause.ROUTING, Cause.ENGINE) and tokens
    ]
    gap = 100 * share(diagnosis.gap_tokens)
    if diagnosis.gap_tokens < 0:
        cached = "measured" if diagnosis.measured_tokens is not None else "simulated"
        told = ", ".join(f"{name} {-points:+z.1f}" for name, points in parts)
        yield f"What was {cached} is {-gap:.1f} points above the ideal: {told}."
    elif parts:
        told = ", ".join(f"{name} {points:z.1f}" for name, points in parts)
        yield f"Of the gap of {gap:.1f} points: {told}."
    won = sum(account.tokens(cause) for cause in PROMPT_CAUSES)
    if won > 0:
        yield f"Mended prompts would add up to {100 * share(won):.1f} points to the ideal; see below."
    if diagnosis.assumed:
        yield (
            f"{diagnosis.replica_tokens:,} KV tokens a replica are assumed, and what is said of capacity and "
            f"routing stands on that: {diagnosis.assumed}."
        )
    other = diagnosis.sample.other_lengths
    if other:
        yield (
            f"{other:,} prompts have another length in token ids than their replica counted: this is not the "
            "engine's tokenizer or chat template."
        )
    if diagnosis.gap_tokens < 0:
        yield (
            "More was cached than prompts alone explain: engines also keep the KV of their answers, and may "
            "have been warm when the log began."
        )


def _headline(finding: Finding, diagnosis: Diagnosis) -> str:
    share = diagnosis.account.share(finding.tokens)
    return f"{finding.cause.value}: {finding.title} ({finding.tokens:,} tokens, {share:.1%})"


def _lines(finding: Finding, diagnosis: Diagnosis, dollars_per_hour: float) -> Iterator[str]:
    yield from finding.evidence
    per_request = finding.tokens / max(1, diagnosis.requests)
    saved_s = per_request * diagnosis.prefill_s_per_token
    text = f"wins {per_request:,.0f} tokens or {1e3 * saved_s:,.1f} ms of prefill a request"
    if diagnosis.requests_per_day is not None:
        dollars = saved_s * diagnosis.requests_per_day / 3600.0 * dollars_per_hour
        text += (
            f", {dollars:,.2f} dollars a day ({diagnosis.requests_per_day:,.0f} requests a day, "
            f"a replica-hour at {dollars_per_hour:.2f})"
        )
    yield text
    yield f"do: {finding.advice}"


def json_object(diagnosis: Diagnosis, dollars_per_hour: float) -> dict[str, Any]:
    """The figures, for programs."""
    account = diagnosis.account
    return {
        "sample": diagnosis.sample.trace.name,
        "requests": len(diagnosis.sample.trace.requests),
        "counted": diagnosis.requests,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "block_tokens": diagnosis.sample.trace.block_tokens,
        "replicas": diagnosis.replicas,
        "capacity_tokens": diagnosis.capacity_tokens,
        "capacity_assumed": bool(diagnosis.assumed),
        "cached_share": {name: round(account.share(tokens), 5) for name, tokens, _ in _levels(diagnosis)},
        "gap_tokens": diagnosis.gap_tokens,
        "lost_tokens": {cause.value: tokens for cause, tokens in account.lost},
        "findings": [_finding_json(one, diagnosis, dollars_per_hour) for one in findings(diagnosis)],
        "apps": [
            {
                "app": app.app,
                "requests": app.requests,
                "first_difference": {
                    "previous": dict(zip(BUCKETS, app.previous, strict=True)),
                    "most_similar": dict(zip(BUCKETS, app.similar, strict=True)),
                },
                "places": [
                    {"in": one.where, "requests": one.requests, "median_token": one.token}
                    for one in app.places
                ],
            }
            for app in diagnosis.apps
        ],
    }


def _finding_json(finding: Finding, diagnosis: Diagnosis, dollars_per_hour: float) -> dict[str, Any]:
    saved_s = finding.tokens / max(1, diagnosis.requests) * diagnosis.prefill_s_per_token
    per_day = diagnosis.requests_per_day
    return {
        "cause": finding.cause.value,
        "title": finding.title,
        "tokens": finding.tokens,
        "requests": finding.requests,
        "ms_per_request": round(1e3 * saved_s, 3),
        "dollars_per_day": None
        if per_day is None
        else round(saved_s * per_day / 3600.0 * dollars_per_hour, 4),
        "evidence": list(finding.evidence),
        "advice": finding.advice,
    }
