"""Reports on periods: hits between two ``/metrics`` pages; a TTFT that changed, with verdict and evidence."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from sim.diagnose.diagnosis import Diagnosis
from sim.diagnose.masking import snippet
from sim.diagnose.metrics_page import EngineCounters
from sim.diagnose.periods import Period, change, period_of
from sim.diagnose.prefix_set import common_prefix
from sim.diagnose.prompt_doc import PromptDoc
from sim.diagnose.report import DiagnosisReport, ReportTable
from sim.diagnose.sample import Sample

MOST_EXAMPLES = 3


def counters_report(counters: EngineCounters) -> DiagnosisReport:
    """What was counted between two pages."""
    share = counters.hit_share
    verdict = "No prompt was looked up between the two pages."
    if share is not None:
        verdict = (
            f"{share:.1%} of {counters.queried_tokens:,.0f} prompt tokens were hits between the two pages."
        )
    period = period_of(counters)
    return DiagnosisReport(
        title="between two /metrics pages",
        verdict=(verdict, "What it could have been needs the prompts: give a request log as FILE, too."),
        tables=() if period is None else (_side_by_side([("", period)]),),
        findings=(),
    )


def period_of_log(diagnosis: Diagnosis, counters: EngineCounters | None) -> Period:
    """A period from its prompts; what engines counted in it goes before what the log tells."""
    counted = None if counters is None else period_of(counters)
    if counted is None:
        share = diagnosis.account.share
        times = [
            one.row.ttft_ms
            for one, counts in zip(diagnosis.sample.words, diagnosis.counted, strict=False)
            if counts and one.row is not None and one.row.ttft_ms is not None
        ]
        counted = Period(
            requests=diagnosis.requests,
            prompt_tokens=diagnosis.account.prompt_tokens / max(1, diagnosis.requests),
            cached_share=share(diagnosis.account.cached_tokens),
            ttft_ms=fmean(times) if times else None,
        )
    return Period(
        counted.requests,
        counted.prompt_tokens,
        counted.cached_share,
        counted.ttft_ms,
        counted.queue_ms,
        diagnosis.account.share(diagnosis.ideal_tokens),
        counted.preemptions,
    )


def change_report(first: Period, second: Period, samples: tuple[Sample, Sample] | None) -> DiagnosisReport:
    """The verdict on two periods. ``samples`` are their prompts, where they are known."""
    made = change(first, second)
    findings: list[tuple[str, tuple[str, ...]]] = []
    tables = [_side_by_side([("before", first), ("after", second)])]
    if made is None:
        verdict = ["No TTFT for both periods: give /metrics pages, or logs with ttft_ms."]
    else:
        verdict = [f"Verdict: {made.verdict}."]
        tables.append(
            ReportTable(
                f"Mean TTFT changed by {made.ttft_ms:+,.1f} ms",
                ("by", "ms"),
                tuple((name, f"{ms:+,.1f}") for name, ms in made.parts),
            )
        )
        findings += [("evidence that is missing", (one,)) for one in made.missing]
    if samples is not None:
        findings = [*_changed_prompts(*samples), *findings]
    return DiagnosisReport("two periods", tuple(verdict), tuple(tables), tuple(findings))


def _side_by_side(periods: Sequence[tuple[str, Period]]) -> ReportTable:
    def row(name: str, values: Sequence[float | None], digits: int, percent: bool = False) -> tuple[str, ...]:
        form = f",.{digits}{'%' if percent else 'f'}"
        return (name, *("-" if value is None else format(value, form) for value in values))

    every = [period for _, period in periods]
    rows = [
        row("requests", [one.requests for one in every], 0),
        row("prompt tokens a request", [one.prompt_tokens for one in every], 0),
        row("cached", [one.cached_share for one in every], 1, percent=True),
        row("ideal, infinite cache", [one.ideal_share for one in every], 1, percent=True),
        row("mean TTFT, ms", [one.ttft_ms for one in every], 1),
        row("of it in the queue, ms", [one.queue_ms for one in every], 1),
        row("µs a computed token", [one.us_per_token for one in every], 1),
        row("preemptions a request", [one.preemptions for one in every], 3),
    ]
    return ReportTable("Means", ("", *(name for name, _ in periods)), tuple(rows))


def _changed_prompts(first: Sample, second: Sample) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Heads that every app's prompts have in common, and equal texts that became other tokens."""
    before, after = _heads(first), _heads(second)
    for app in [app for app in after if app in before][:MOST_EXAMPLES]:
        old, new = before[app], after[app]
        at = common_prefix(old, new)
        if at < min(len(old), len(new)):
            yield (
                f"prompts of {app or 'all apps'} begin otherwise, from byte {at:,}",
                (f"before: {snippet(old, at)}", f"after:  {snippet(new, at)}"),
            )
    tokens = {one.doc.text: one.token_ids for one in first.words if one.doc and one.token_ids}
    other = [
        (one.doc, one.token_ids, tokens[one.doc.text])
        for one in second.words
        if one.doc and one.token_ids and tokens.get(one.doc.text, one.token_ids) != one.token_ids
    ]
    if other:
        _, new_ids, old_ids = other[0]
        place = next(
            (at for at, (one, two) in enumerate(zip(old_ids or (), new_ids, strict=False)) if one != two), 0
        )
        yield (
            f"{len(other)} equal texts became other tokens: the template or the tokenizer changed",
            (f"first at token {place:,}", "do: compare chat templates and tokenizer versions"),
        )


def _heads(sample: Sample) -> dict[str, bytes]:
    """Per app, the text of its last prompt up to the conversation."""
    return {one.app or "": _head(one.doc) for one in sample.words if one.doc is not None}


def _head(doc: PromptDoc) -> bytes:
    return b"".join(segment.text for segment in doc.segments if segment.in_head)
