"""Numbers that docs work out by hand, or take from the code: computed here, and looked up in the text."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from replica.config import ReplicaConfig
from sim.bounds import ideal_cached_share
from sim.plan.make_report import make_report
from sim.plan.plan_file import load_plan
from sim.plan.report_view import plain_lines
from sim.plan.worksheet import Line
from sim.simulate_arguments import add_arguments, simulation_settings
from sim.workload.arrivals import plan_arrivals
from sim.workload.sources import open_trace
from tests.sim.docs_phrases import PHRASES, ROOT, Parts, read
from tests.sim.docs_tables import CONVERSATION, POLICIES, TABLES, Row, rows

PLANS = ROOT / "configs" / "plans"
TRACES = Path(os.environ.get("WARMROUTE_TRACES") or ROOT.parent / "shared" / "traces")
"""Real traces, where there are some."""
SHEETS = {
    "operations": "routers",
    "routing": "docs/routing",
    "kv_cache": "docs/kv_cache",
    "diagnosis": "docs/diagnosis",
    "load_testing": "docs/load_testing",
}
"""By document: the plan that prints its worked numbers, under the document's own headings."""
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?|(?<![\w.,/-])\.\d+")
NOT_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)

GIVEN = {
    "README.md": (
        "135M-parameter",
        "Python 3.11+",
        "at 2.5 times its speed",
        "12,031 requests",  # counted below
        "the 0.396 above it",  # computed below
        "FAST'25",
        "(1.5 GB: torch)",  # a download
    ),
    "docs/simulator.md": (
        "sglang-router 0.3.2",
        "1.1 is normal",  # the table of `simulate` has it, README's command for one
        "with 95% intervals",
        "and 16-bit math",
        "RTX4090",
        "RTXPRO6000",
        "RTX PRO 6000",
        "Llama 3.1 8B",
        "as they are by 64 tokens or more",
        "before believing a 10% difference",
        "everything 10 to 20% too fast",  # in the log
    ),
    "docs/diagnosis.md": ("if the 95% interval of every paired difference",),
    "docs/kv_cache.md": (
        "50,000 random requests",
        "after 1,600 tokens says nothing of that after 364",
        "vLLM 0.24",
        "a digest's last 64 bits; `bytes`: all 256",
        "a 24th at once",
        "256 MiB (or one longest request)",
        "SmolLM2-135M",
        "answer 503",
        "else 400",
        "over 900 tokens of prose",  # this and the next: tests.replica.packed_quality
        "for 95% of them (mean KL divergence 0.005), with `file` for 97% (0.002), with `int4` for "
        "79% (0.118)",
        "has 4 bits, 32 to a scale",
    ),
    "docs/load_testing.md": ("users who wait", "12 users, 20 s"),
}
"""Names, versions, inputs, and what other tests assert."""
MEASURED = {
    "README.md": (
        (
            "the first 3,000 requests gave a mean TTFT of 1.01 s against 2.60 s behind sglang-router and "
            "2.24 s behind vllm-router (p99 10.0 against 16.0 and 16.1 s)",
            "| × 2.5, 3,000 |",
        ),
    ),
}
"""On a machine, at some time: all numbers of the phrase stand in one line of the log that begins so."""


def in_order(text: str, *parts: str) -> None:
    """``parts`` stand in ``text``, one after another."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"{part!r} is not there after {text[max(0, at - 60) : at]!r}"
        at = found + len(part)


def stands_in(value: float, text: str) -> bool:
    """``value`` is a number of ``text``, to as many digits as are written there.

    >>> stands_in(0.5706, "0.57 core"), stands_in(729.0, "at 729."), stands_in(4.666, "4.6")
    (True, True, False)
    """
    written = [number.rstrip(",") for number in NUMBER.findall(text)]
    return any(f"{value:,.{len(number.partition('.')[2])}f}" == number for number in written)


@pytest.mark.parametrize(
    ("document", "parts"), [(document, parts) for document, all_of in PHRASES.items() for parts in all_of]
)
def test_what_the_code_says_stands_in_the_document(document: str, parts: Callable[[], Parts]) -> None:
    in_order(read(document), *parts())


@pytest.mark.parametrize("document", sorted(GIVEN))
def test_every_number_is_accounted_for(document: str) -> None:
    """Printed by a sheet or a table's command, made from the code, measured and logged, or given."""
    whole = (ROOT / document).read_text()
    for line in {row.line for row in rows() if row.table.document == document}:
        whole = whole.replace(line, "")
    whole = re.sub(r"^\| (?:both|first half|RTX).*\|$", "", whole, flags=re.MULTILINE)  # test_fidelity.py
    whole = re.sub(r"^\| `[\w.]+` \| .*\|$", "", whole, flags=re.MULTILINE)  # settings, see below
    text = re.sub(r"\s*\n(?:> )?\s*", " ", whole)
    phrases = [part for parts in PHRASES.get(document, ()) for part in parts()]
    phrases += [*GIVEN[document], *(phrase for phrase, _ in MEASURED.get(document, ()))]
    if document == "docs/simulator.md":  # test_fidelity.py
        phrases += ["11% in the mean, 10% where all experts", "too fast by up to 29% for few experts"]
    for phrase in phrases:
        text = text.replace(phrase, "")
    sheet = SHEETS.get(document.removeprefix("docs/").removesuffix(".md"))
    report = None if sheet is None else make_report(load_plan(PLANS / f"{sheet}.yaml"))
    printed = {number for line in plain_lines(report) for number in _numbers(line)} if report else set()
    values = [line.value for line in report.lines()] if report else []
    left = [
        number
        for number in _numbers(NOT_PROSE.sub("", text))
        if ("." in number or int(number.replace(",", "")) >= 10)
        and number not in printed
        and not any(stands_in(value, number) for value in values)
    ]
    assert not left, "name where they come from: in a sheet, docs_phrases.PHRASES, GIVEN or MEASURED"


def _numbers(text: str) -> list[str]:
    return [number.rstrip(",") for number in NUMBER.findall(text)]


@pytest.mark.parametrize("document", sorted(GIVEN))
def test_what_is_given_or_measured_stands_there(document: str) -> None:
    text = read(document)
    for phrase in (*GIVEN[document], *(phrase for phrase, _ in MEASURED.get(document, ()))):
        assert phrase in text, phrase


def test_what_was_measured_is_logged() -> None:
    log = (ROOT / "docs/log.md").read_text().splitlines()
    for phrase, begin in (one for measured in MEASURED.values() for one in measured):
        lines = [set(_numbers(line)) for line in log if line.startswith(begin)]
        assert any(set(_numbers(phrase)) <= numbers for numbers in lines), phrase


def test_what_is_said_to_be_in_the_log_is_there() -> None:
    """Numbers of sentences that end by naming it."""
    logged = {number.lstrip("0") for number in _numbers((ROOT / "docs/log.md").read_text())}
    found = 0
    for path in sorted((ROOT / "docs").glob("*.md")):
        for sentence in re.split(r"(?<=[.:;]) ", read(f"docs/{path.name}")):
            if path.name == "log.md" or not re.search(
                r"\((?:\[\w+\]\(log\.md\)|`docs/log\.md`)\)\W*$", sentence
            ):
                continue
            said = [number for number in _numbers(NOT_PROSE.sub("", sentence)) if len(number) > 1]
            found += len(said)
            assert not [number for number in said if number.lstrip("0") not in logged], (path.name, sentence)
    assert found > 5


@pytest.mark.parametrize("document", SHEETS)
def test_what_a_sheet_computes_stands_in_its_document(document: str) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text()
    sheet = f"configs/plans/{SHEETS[document]}.yaml"
    assert f"`warmroute plan {sheet}`" in text
    parts = dict(re.findall(r"^#+ (.+)\n((?:(?!#+ ).*\n)*)", text, re.MULTILINE))
    report = make_report(load_plan(ROOT / sheet))
    for section in report.sections:
        assert section.title in parts, f"{sheet}: no heading {section.title!r} in {document}.md"
        for line in section.entries:
            if isinstance(line, Line) and line.formula is not None:
                assert stands_in(line.value, parts[section.title]), (document, section.title, line)


def test_every_sheet_belongs_to_a_document() -> None:
    assert {f"docs/{path.stem}" for path in (PLANS / "docs").iterdir()} < set(SHEETS.values())


def test_every_row_of_simulated_figures_has_a_command() -> None:
    """``python -m tests.sim.docs_tables FOLDER`` runs them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = list(rows())
    assert len(found) >= 28
    for row in found:
        for arguments in row.runs:
            args = parser.parse_args(arguments)
            assert len(args.policy) == 1, row.line
            simulation_settings(args)  # refuses options that would do nothing


def test_figures_are_written_as_in_the_docs() -> None:
    spread = {"mean": 1.0449, "p50": 0.5, "p99": 10.62}
    figures = {
        "ttft_s": spread,
        "e2e_s": {"mean": 121.4},
        "in_slo_share": 0.9,
        "cached_share": 0.3,
        "ideal_cached_share": 0.4,
    }
    row = Row(TABLES[0], "| nothing | `--policy predicted_finish` | a | b | c | d |", ())
    assert row.now([figures]) == "| nothing | `--policy predicted_finish` | 1.04 / 10.6 | 121 | .900 | .750 |"
    bare = Row(TABLES[1], "| mirror | | a | b | c | d |", ())
    assert bare.now([figures]) == "| mirror | | 1.04 / 10.6 | 121 | .900 | .750 |"
    three = row.now([figures] * 3)
    assert "| 1.04, 1.04, 1.04 / 10.6, 10.6, 10.6 | 121, 121, 121 |" in three
    guard = Row(TABLES[3], "| conversation `--rate 2` | a | b | c | d |", ())
    held = figures | {"in_slo_share": 0.8, "ttft_s": spread | {"mean": 1.2}}
    assert guard.now([figures, figures, held, held]) == (
        "| conversation `--rate 2` | 1.04 → 1.20 | 121 → 121 | .900 → .800 | .300 → .300 |"
    )
    policy = Row(TABLES[4], "| `round_robin` | a | **b** | c | d | e | f |", ())
    assert policy.now([figures]) == "| `round_robin` | 1.04 s | **0.50 s** | 10.6 s | 121.4 s | .75 | .90 |"


def test_the_best_of_readme_s_table_are_set_in_bold() -> None:
    found = [row.line.strip("|").split("|")[1:] for row in rows() if row.table.header == POLICIES]
    assert len(found) == 4
    for column, cells in enumerate(zip(*found, strict=True)):
        values = [float(cell.strip(" *s")) for cell in cells]
        best = min(values) if column < 4 else max(values)
        assert [value == best for value in values] == [cell.strip().startswith("**") for cell in cells]


@pytest.mark.skipif(not (TRACES / CONVERSATION).exists(), reason="needs Mooncake's conversation trace")
def test_what_readme_says_of_the_conversation_trace() -> None:
    trace = open_trace(str(TRACES / CONVERSATION))
    plan = plan_arrivals(trace, rate=2.5)
    warm_s = 0.25 * max(arrival.at_s or 0.0 for arrival in plan)
    ideal = ideal_cached_share(
        (
            (arrival.request.block_ids, arrival.request.prompt_tokens, (arrival.at_s or 0.0) >= warm_s)
            for arrival in plan
        ),
        trace.block_tokens,
    )
    in_order(read("README.md"), f"{len(trace.requests):,} requests", f"over the {ideal:.3f} above it")


def test_settings_of_a_replica_have_their_defaults() -> None:
    """Rows of docs/kv_cache.md whose default is a word or a number."""
    found = 0
    text = (ROOT / "docs/kv_cache.md").read_text()
    for key, default in re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", text, re.MULTILINE):
        written = default.split(",")[0].strip()
        if written.split()[0] in ("required", "empty", "by", "measured"):
            continue
        if key in ("kv_tokens", "cache.page_size"):  # None in the config: decided by what fits, by the kind
            continue
        value = _default(ReplicaConfig, key.split("."))
        shown = (
            f"{value:g}"
            if isinstance(value, float)
            else str("none" if value in (None, ()) else value).lower()
        )
        assert shown == written, key
        found += 1
    assert found > 25


def _default(model: type[BaseModel], path: list[str]) -> Any:
    field = model.model_fields[path[0]]
    if len(path) == 1:
        return field.get_default(call_default_factory=True)
    return _default(_section(field.annotation), path[1:])


def _section(annotation: Any) -> type[BaseModel]:
    """The config section in an annotation like ``Section | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        try:
            return _section(part)
        except LookupError:
            continue
    raise LookupError(annotation)
