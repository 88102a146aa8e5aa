"""What documents say in numbers, computed from the code and its data: phrases that have to stand there.

By document; every function gives parts in the order in which they stand.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import sim.fidelity
from replica.contract.prefill_cost import PrefillCost
from replica.contract.roofline.gpus import GPUS, USUAL_READ_SHARE
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.kv_cache.prefix_cache import PrefixCache
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from router.routing.prompt_blocks import TextLayout
from sim.acceptance.verdict import RULE_OF_THREE, Rule
from sim.bench.overhead_report import CLUMPED
from sim.bench.side_by_side import CACHED_WITHIN, TTFT_WITHIN
from sim.diagnose.mend import LEAST_SHARE
from sim.diagnose.periods import Period, change
from sim.diagnose.sample import DEFAULT_BLOCK_TOKENS
from sim.fidelity.check import read_measured_runs
from sim.fidelity.comparison import compare
from sim.lesson import burst_trace
from sim.replay_client import CLUMPED_NS
from sim.results import CLIENT_LIMIT, CLUMPED_LIMIT, DECODE_BUFFER_S, LATE_LIMIT_S, Slo
from sim.rivals import llmd_sticky, llmd_weighted, sglang_cache_aware
from sim.step_time.presets import PRESETS
from sim.two_pools import KvMoves
from sim.workload.hot_prefix import HotPrefix
from sim.workload.sources import open_trace
from sim.workload.text_sessions import CHARACTERS_PER_TOKEN
from sim.workload.trimmed_chats import TrimmedChats

ROOT = Path(__file__).parents[2]
Parts = tuple[str, ...]


def read(document: str) -> str:
    """The document with its lines joined."""
    return re.sub(r"\s*\n(?:> )?\s*", " ", (ROOT / document).read_text())


def first_rows() -> Parts:
    """Of README."""
    return (f"takes the first {len(open_trace('mooncake').requests):,} rows",)


def within_of_one() -> Parts:
    """Several routers: what docs/routing.md's table of them has, over its first row."""
    text = (ROOT / "docs/routing.md").read_text()
    rows = re.findall(r"^\| \d \| `--routers \d[^`]*` \| ([\d.]+) \|", text, re.MULTILINE)
    one, *several = map(float, rows)
    assert len(several) == 3
    most = max(abs(value / one - 1.0) for value in several)
    return (f"keep the mean TTFT within {100 * most:.0f}% of one in the simulator",)


def step_times() -> Parts:
    """Of docs/simulator.md."""
    emulated = PRESETS["emufleet"]
    ada, blackwell = GPUS["rtx-4090"], GPUS["rtx-pro-6000"]
    return (
        f"{1e3 * emulated.step_s:g} ms + {1e6 * emulated.decode_sequence_s:g} µs a decoding sequence + "
        f"{1e6 * emulated.prefill_token_s:g} µs a prefill token, attention doubling at "
        f"{emulated.attention_tokens:,.0f}",
        f"int4 means {PRECISIONS['int4'].weight_bits:g} bits a weight (a 16-bit scale per 128)",
        f"an RTX 4090 reads {ada.read_bytes_per_s / 1e9:,.0f} of its "
        f"{ada.memory_bytes_per_s / 1e9:,.0f} GB/s, an RTX PRO 6000 "
        f"{blackwell.read_bytes_per_s / 1e9:,.0f} of {blackwell.memory_bytes_per_s / 1e9:,.0f}",
        f"{USUAL_READ_SHARE:g} of the bandwidth stands in",
    )


def traffic_rivals_and_columns() -> Parts:
    """Of docs/simulator.md."""
    moves = KvMoves()
    return (
        f"the first {len(open_trace('mooncake').requests):,} rows of Mooncake's conversation trace",
        f"beyond {TrimmedChats().limit_tokens:,} tokens",
        f"popular with {HotPrefix().hot_share:.0%} of the traffic",
        f"({1e3 * moves.transfer_s:g}:{1e6 * moves.transfer_token_s:g}, a measured one)",
        f"longest prefix if over {sglang_cache_aware.CACHE_THRESHOLD:.0%}, unless requests differ by "
        f"{sglang_cache_aware.BALANCE_ABS_THRESHOLD} and {sglang_cache_aware.BALANCE_REL_THRESHOLD:g} times",
        f"queue {llmd_weighted.QUEUE:g} + memory {llmd_weighted.MEMORY:g} + prefix {llmd_weighted.PREFIX:g}; "
        f"sticky until {llmd_sticky.MAX_EXTRA_WAIT_S:g} s of extra wait",
        f"decoding within {DECODE_BUFFER_S:g} s + {Slo().tpot_ms:g} ms a token",
    )


def burst() -> Parts:
    """Of docs/simulator.md."""
    assert (burst_trace.SESSIONS, burst_trace.OLD_HOLDERS, burst_trace.REPLICAS) == (16, 2, 4)
    return (
        "two replicas have just evicted sixteen sessions, two fresh ones join, "
        f"{burst_trace.make_burst(1).burst} requests come in {burst_trace.BURST_S:g} s",
    )


def measured_vllm() -> Parts:
    """Of docs/simulator.md: the two runs that ``--fidelity`` replays. Its tables: test_fidelity.py."""
    folder = Path(sim.fidelity.__file__).parent / "data"
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("*/meta.json"))]
    versions = {one["vllm_version"].removesuffix(".0") for one in told}
    models = {one["model"].split("/")[1].replace("-", " ") for one in told}
    runs = read_measured_runs(folder)
    (count,) = {len(run.outcomes) for run in runs}
    for run in runs:
        assert count / max(outcome.sent_s for outcome in run.outcomes) == pytest.approx(10.0, rel=0.1)
    allowed = ", ".join(f"{one.allowed:.0%}" for one in compare(runs[0].outcomes, runs[0].outcomes))
    return (
        f"two measured runs of vLLM {versions.pop()} ({models.pop()}, {count} ShareGPT requests at 10/s",
        f"(wanted: {allowed})",
    )


def marks() -> Parts:
    """Of docs/simulator.md: ``bench fidelity``."""
    return (f"(cached share {100 * CACHED_WITHIN:g} point, TTFT p50 {TTFT_WITHIN:.0%})",)


def emulated_over_http() -> Parts:
    """Of docs/simulator.md: what the log's table of emulated replicas has at most."""
    log = (ROOT / "docs/log.md").read_text()
    table = log[log.index("\nEmulated replicas (600 requests") :].strip().split("\n\n")[1]
    shares = re.findall(r"^\| \w+ \| (\.\d+) → (\.\d+) \|", table, re.MULTILINE)
    medians = re.findall(r"→ [\d.]+ \(([+-][\d.]+)%\)", table)
    assert len(shares) == len(medians) == 4
    points = max(abs(float(live) - float(made)) for live, made in shares)
    return (f"within {100 * points:.1f} points and {max(abs(float(one)) for one in medians):.0f}%",)


def diagnosis() -> Parts:
    """Of docs/diagnosis.md."""
    return (
        f"Without token ids a block of {DEFAULT_BLOCK_TOKENS} tokens is as many bytes as the log's own "
        f"`prompt_tokens` make of it, else {DEFAULT_BLOCK_TOKENS * CHARACTERS_PER_TOKEN}",
        f"An edit that wins less than {LEAST_SHARE:.1%} of all tokens is not mentioned",
    )


def diagnosis_of_periods() -> Parts:
    """Of docs/diagnosis.md."""
    made = change(Period(100, 1_000, 0.75, ttft_ms=25.0), Period(100, 1_000, 0.30, ttft_ms=70.0))
    assert made is not None and made.ttft_ms == pytest.approx(45.0)
    assert dict(made.parts)["other hits"] == pytest.approx(45.0)
    return ("250 computed tokens at 100 µs after 75% hits, 700 after 30%: 45 ms more, all of it fewer hits",)


def comparison_of_replicas() -> Parts:
    """Of docs/diagnosis.md."""
    rule = Rule()
    head = TextLayout().end(1)
    assert TextLayout().end(33) - TextLayout().end(32) == 2 * head
    return (
        f"share of prompts with any other token | {rule.most_flips:.0%} |",
        f"share of the positions compared | {rule.most_mismatches:.0%} |",
        f"where the server tells log-probabilities | {rule.most_kl:g} nats |",
        f"ratio to the baseline's | {rule.most_slower:.0%} |",
        f"up to {RULE_OF_THREE:g} / n may: {RULE_OF_THREE / rule.most_flips:g} prompts at least for "
        f"{rule.most_flips:.0%}",
        f"({head} bytes at its head, twice that every 32 blocks)",
    )


def smollm2() -> Parts:
    """Of docs/kv_cache.md."""
    token = MODEL_SHAPES["smollm2-135m"].kv_bytes_per_token(32)
    assert token == 30 * 2 * 3 * 64 * 4
    hit, pulled = 2_896 * token, 2_032 * token
    computed_s = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6).seconds(2_032, 0)
    large = MODEL_SHAPES["llama-3.1-70b"].kv_bytes_per_token()
    return (
        f"= {token:,.0f} bytes a token in fp32: {16 * token / 2**20:.1f} MiB a block, "
        f"{65_536 * token / 1e9:.0f} GB for 65,536 tokens. A system prompt of 600 tokens shared by 100 "
        f"conversations is stored once, {600 * token / 1e6:.0f} MB",
        f"2,896 tokens are {hit / 1e6:.0f} MB. From the host at an assumed 10 GB/s that is "
        f"{hit / 1e7:.0f} ms, from a disk at 1.5 GB/s {hit / 1.5e6:.0f} ms; computed at 62.5 µs a token "
        f"{2_896 * 62.5e-3:.0f} ms. Both are fetched. At 0.5 GB/s ({hit / 0.5e6:.0f} ms)",
        f"2,032 tokens: {pulled / 1e6:.0f} MB. At the assumed 1 ms + 1 GB/s {1 + pulled / 1e6:.0f} ms, "
        f"computed at 62.5 µs a token {1e3 * computed_s:.0f} ms: pulled. At 0.5 GB/s "
        f"{1 + pulled / 0.5e6:.0f} ms: computed.",
        f"{large / 1e3:.0f} KB a token: {8_192 * large / 1e9:.1f} GB for 8,192 tokens, "
        f"{8_192 * large / 1e10:.2f} s at 10 GB/s",
    )


def last_token() -> Parts:
    """Of docs/kv_cache.md: 48 tokens that are cached whole hit 32, 49 hit 48."""
    hits = {}
    for tokens in (48, 49):
        scheduler = Scheduler(PrefixCache(32, block_size=16), SchedulerLimits(4, 256, 256))
        for name in ("first", "again"):
            sequence = Sequence(name, range(tokens), max_tokens=1)
            scheduler.add(sequence)
            scheduler.commit(scheduler.schedule(), {name: 7})
        hits[tokens] = sequence.cached_tokens
    return (f"A prompt of 48 tokens that is cached whole hits {hits[48]}", f"49 tokens hit {hits[49]}")


def harness_limits() -> Parts:
    """Of docs/load_testing.md."""
    return (
        f"over {CLIENT_LIMIT:.0%}, or (replay) when 1% of requests is sent over {1e3 * LATE_LIMIT_S:g} ms "
        "late",
        f"CLUMPED when over {CLUMPED_LIMIT:.0%} of events came in one piece with the one before (or, where "
        f"the replica stamps events with `sent_ns`, with one it sent {CLUMPED_NS / 1e6:g} ms sooner",
        f"`clumped`, marked over {CLUMPED:.0%}",
    )


def load_users() -> Parts:
    """Of docs/load_testing.md, from what ``make load`` runs."""
    users = (ROOT / "tests/load/locustfile.py").read_text()

    def constant(pattern: str) -> str:
        found = re.search(pattern, users)
        assert found, pattern
        return found[1]

    (weight,) = map(int, re.findall(r"^    weight = (\d+)", users, re.MULTILINE))  # the others have 1
    of = weight + 2
    pauses = re.search(r"between\(([\d.]+) \* THINK, ([\d.]+) \* THINK\)", users)
    assert pauses
    turns, documents = constant(r"TURNS = (\d+)"), constant(r"DOCUMENTS = (\d+)")
    steps = constant(r"STEPS = \((\d, \d)\)").replace(", ", " to ")
    return (
        f"`ChatUser` | {weight} of {of} |",
        f"a history that grows for {turns} turns, thinks {pauses[1]} to {float(pauses[2]):g} s",
        f"`AgentUser` | 1 of {of} | {steps} steps",
        f"`RagUser` | 1 of {of} | two of {documents} documents by Zipf's law",
    )


def prompt_blocks() -> Parts:
    """Of docs/routing.md."""
    layout = TextLayout()

    def blocks(kib: int) -> int:
        return next(count for count in range(1, 1_000) if layout.end(count + 1) > kib * 1024)

    counts = " / ".join(str(blocks(kib)) for kib in (2, 32, 256))
    return (f"{layout.end(1)} bytes at the head, doubling every 32 blocks, so 2 / 32 / 256 KiB are {counts}",)


PHRASES: dict[str, tuple[Callable[[], Parts], ...]] = {
    "README.md": (first_rows, within_of_one),
    "docs/simulator.md": (
        traffic_rivals_and_columns,
        burst,
        step_times,
        measured_vllm,
        emulated_over_http,
        marks,
    ),
    "docs/diagnosis.md": (diagnosis, diagnosis_of_periods, comparison_of_replicas),
    "docs/kv_cache.md": (last_token, smollm2),
    "docs/load_testing.md": (load_users, harness_limits),
    "docs/routing.md": (prompt_blocks,),
    "docs/operations.md": (within_of_one,),
}
"""By document."""
