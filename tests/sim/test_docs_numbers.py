"""Numbers that docs work out by hand, or take from the code: computed here, and looked up in the text."""

import argparse
import re
from pathlib import Path

import pytest

from replica.contract.prefill_cost import PrefillCost
from replica.contract.roofline.gpus import GPUS, USUAL_READ_SHARE
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.kv_cache.prefix_cache import PrefixCache
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from router.routing.prompt_blocks import TextLayout
from sim.acceptance.verdict import RULE_OF_THREE, Rule
from sim.diagnose.mend import LEAST_SHARE
from sim.diagnose.periods import Period, change
from sim.lesson import burst_trace
from sim.plan.make_report import make_report
from sim.plan.plan_file import load_plan
from sim.plan.worksheet import Line
from sim.results import DECODE_BUFFER_S, Slo
from sim.rivals import llmd_sticky, llmd_weighted, sglang_cache_aware
from sim.simulate_arguments import add_arguments
from sim.step_time.presets import PRESETS
from sim.workload.hot_prefix import HotPrefix
from sim.workload.sources import open_trace
from sim.workload.trimmed_chats import TrimmedChats
from tests.sim.docs_tables import TABLES, Row, rows

DOCS = Path(__file__).parents[2] / "docs"
PLANS = Path(__file__).parents[2] / "configs" / "plans"
SHEETS = {
    "operations": "routers",
    "routing": "docs/routing",
    "kv_cache": "docs/kv_cache",
    "diagnosis": "docs/diagnosis",
}
"""By document: the plan that prints its worked numbers, under the document's own headings."""
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def read(name: str) -> str:
    """The document with its lines joined."""
    return re.sub(r"\s*\n(?:> )?\s*", " ", (DOCS / name).read_text())


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


@pytest.mark.parametrize("document", SHEETS)
def test_what_a_sheet_computes_stands_in_its_document(document: str) -> None:
    text = (DOCS / f"{document}.md").read_text()
    sheet = f"configs/plans/{SHEETS[document]}.yaml"
    assert f"`warmroute plan {sheet}`" in text
    parts = dict(re.findall(r"^#+ (.+)\n((?:(?!#+ ).*\n)*)", text, re.MULTILINE))
    report = make_report(load_plan(PLANS.parents[1] / sheet))
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
    assert len(found) >= 18
    for row in found:
        for arguments in row.runs:
            assert len(parser.parse_args(arguments).policy) == 1, row.line


def test_figures_are_written_as_in_the_docs() -> None:
    spread = {"mean": 1.0449, "p99": 10.62}
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


def test_simulator_step_times() -> None:
    text = read("simulator.md")
    emulated = PRESETS["emufleet"]
    in_order(
        text,
        f"{1e3 * emulated.step_s:g} ms + {1e6 * emulated.decode_sequence_s:g} µs a decoding sequence + "
        f"{1e6 * emulated.prefill_token_s:g} µs a prefill token, attention doubling at "
        f"{emulated.attention_tokens:,.0f}",
        f"int4 means {PRECISIONS['int4'].weight_bits:g} bits a weight (a 16-bit scale per 128)",
    )
    ada, blackwell = GPUS["rtx-4090"], GPUS["rtx-pro-6000"]
    in_order(
        text,
        f"an RTX 4090 reads {ada.read_bytes_per_s / 1e9:,.0f} of its "
        f"{ada.memory_bytes_per_s / 1e9:,.0f} GB/s, an RTX PRO 6000 "
        f"{blackwell.read_bytes_per_s / 1e9:,.0f} of {blackwell.memory_bytes_per_s / 1e9:,.0f}",
        f"{USUAL_READ_SHARE:g} of the bandwidth stands in",
    )


def test_simulator_traffic_rivals_and_columns() -> None:
    text = read("simulator.md")
    in_order(
        text,
        f"the first {len(open_trace('mooncake').requests):,} rows of Mooncake's conversation trace",
        f"beyond {TrimmedChats().limit_tokens:,} tokens",
        f"popular with {HotPrefix().hot_share:.0%} of the traffic",
        f"longest prefix if over {sglang_cache_aware.CACHE_THRESHOLD:.0%}, unless requests differ by "
        f"{sglang_cache_aware.BALANCE_ABS_THRESHOLD} and {sglang_cache_aware.BALANCE_REL_THRESHOLD:g} times",
        f"queue {llmd_weighted.QUEUE:g} + memory {llmd_weighted.MEMORY:g} + prefix {llmd_weighted.PREFIX:g}; "
        f"sticky until {llmd_sticky.MAX_EXTRA_WAIT_S:g} s of extra wait",
        f"decoding within {DECODE_BUFFER_S:g} s + {Slo().tpot_ms:g} ms a token",
    )


def test_the_burst_lesson() -> None:
    assert (burst_trace.SESSIONS, burst_trace.OLD_HOLDERS, burst_trace.REPLICAS) == (16, 2, 4)
    burst = burst_trace.make_burst(1).burst
    in_order(
        read("simulator.md"),
        "two replicas have just evicted sixteen sessions, two fresh ones join, "
        f"{burst} requests come in {burst_trace.BURST_S:g} s",
    )


def test_diagnosis() -> None:
    text = read("diagnosis.md")
    in_order(text, f"An edit that wins less than {LEAST_SHARE:.1%} of all tokens is not mentioned")
    made = change(Period(100, 1_000, 0.75, ttft_ms=25.0), Period(100, 1_000, 0.30, ttft_ms=70.0))
    assert made is not None and made.ttft_ms == pytest.approx(45.0)
    assert dict(made.parts)["other hits"] == pytest.approx(45.0)
    in_order(
        text, "250 computed tokens at 100 µs after 75% hits, 700 after 30%: 45 ms more, all of it fewer hits"
    )
    rule = Rule()
    for row, limit in (
        ("share of prompts with any other token", f"{rule.most_flips:.0%}"),
        ("share of the positions compared", f"{rule.most_mismatches:.0%}"),
        ("where the server tells log-probabilities", f"{rule.most_kl:g} nats"),
        ("ratio to the baseline's", f"{rule.most_slower:.0%}"),
    ):
        in_order(text, f"{row} | {limit} |")
    in_order(
        text,
        f"up to {RULE_OF_THREE:g} / n may: {RULE_OF_THREE / rule.most_flips:g} prompts at least for "
        f"{rule.most_flips:.0%}",
    )
    layout = TextLayout()
    head = layout.end(1)
    assert layout.end(33) - layout.end(32) == 2 * head
    in_order(text, f"({head} bytes at its head, twice that every 32 blocks)")


def test_kv_cache_of_smollm2() -> None:
    text = read("kv_cache.md")
    shape = MODEL_SHAPES["smollm2-135m"]
    token = shape.kv_bytes_per_token(32)
    assert token == 30 * 2 * 3 * 64 * 4
    in_order(
        text,
        f"= {token:,.0f} bytes a token in fp32: {16 * token / 2**20:.1f} MiB a block, "
        f"{65_536 * token / 1e9:.0f} GB for 65,536 tokens. A system prompt of 600 tokens shared by 100 "
        f"conversations is stored once, {600 * token / 1e6:.0f} MB",
    )
    hit = 2_896 * token
    in_order(
        text,
        f"2,896 tokens are {hit / 1e6:.0f} MB. From the host at an assumed 10 GB/s that is "
        f"{hit / 1e7:.0f} ms, from a disk at 1.5 GB/s {hit / 1.5e6:.0f} ms; computed at 62.5 µs a token "
        f"{2_896 * 62.5e-3:.0f} ms. Both are fetched. At 0.5 GB/s ({hit / 0.5e6:.0f} ms)",
    )
    pulled = 2_032 * token
    computed_s = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6).seconds(2_032, 0)
    in_order(
        text,
        f"2,032 tokens: {pulled / 1e6:.0f} MB. At the assumed 1 ms + 1 GB/s {1 + pulled / 1e6:.0f} ms, "
        f"computed at 62.5 µs a token {1e3 * computed_s:.0f} ms: pulled. At 0.5 GB/s "
        f"{1 + pulled / 0.5e6:.0f} ms: computed.",
    )
    large = MODEL_SHAPES["llama-3.1-70b"].kv_bytes_per_token()
    in_order(
        text,
        f"{large / 1e3:.0f} KB a token: {8_192 * large / 1e9:.1f} GB for 8,192 tokens, "
        f"{8_192 * large / 1e10:.2f} s at 10 GB/s",
    )


def test_the_last_token_is_computed() -> None:
    """docs/kv_cache.md: 48 tokens that are cached whole hit 32, 49 hit 48."""
    for tokens, hit in ((48, 32), (49, 48)):
        scheduler = Scheduler(PrefixCache(32, block_size=16), SchedulerLimits(4, 256, 256))
        for name in ("first", "again"):
            sequence = Sequence(name, range(tokens), max_tokens=1)
            scheduler.add(sequence)
            scheduler.commit(scheduler.schedule(), {name: 7})
        assert sequence.cached_tokens == hit
    in_order(read("kv_cache.md"), "A prompt of 48 tokens that is cached whole hits 32", "49 tokens hit 48")
