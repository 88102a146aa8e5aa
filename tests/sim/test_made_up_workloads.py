"""Seeded workloads: what they promise about sharing, times and lengths; Azure's files."""

import gzip
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

import warmroute
from sim.bounds import ideal_cached_share
from sim.simulate import SimulationSettings, simulate
from sim.workload.arrival_process import ArrivalProcess, retimed
from sim.workload.azure_file import read_azure_file
from sim.workload.block_names import BlockNames
from sim.workload.hot_prefix import HotPrefix, hot_prefix_trace
from sim.workload.rag_mix import RagMix, rag_trace
from sim.workload.sources import MADE_UP, open_trace
from sim.workload.strangers import strangers_trace
from sim.workload.trace import Trace, TraceError
from sim.workload.trimmed_chats import TrimmedChats, trimmed_chats_trace


def ideal(trace: Trace) -> float:
    share = ideal_cached_share(
        ((request.block_ids, request.prompt_tokens, True) for request in trace.requests), trace.block_tokens
    )
    assert share is not None
    return share


def gaps_s(trace: Trace) -> list[float]:
    times = [request.timestamp_ms or 0.0 for request in trace.requests]
    return [(later - earlier) / 1e3 for earlier, later in pairwise(times)]


@pytest.mark.parametrize("name", sorted(MADE_UP))
def test_a_seed_is_a_trace(name: str) -> None:
    one, again, other = (open_trace(name, requests=150, seed=seed) for seed in (3, 3, 4))
    assert one == again != other
    assert len(one.requests) == 150
    for request in one.requests:
        assert len(request.block_ids) == request.prompt_tokens // one.block_tokens
        assert request.output_tokens >= 1


@pytest.mark.parametrize("name", sorted(MADE_UP))
def test_an_id_names_a_block_and_all_before_it(name: str) -> None:
    parents: dict[int, int | None] = {}
    for request in open_trace(name, requests=300).requests:
        parent = None
        for block in request.block_ids:
            assert parents.setdefault(block, parent) == parent
            parent = block


@pytest.mark.parametrize("name", sorted(MADE_UP))
def test_every_workload_runs(name: str) -> None:
    trace = open_trace(name, requests=80)
    (result,) = simulate(
        trace, ["predicted_finish"], replicas=3, settings=SimulationSettings(warmup_share=0.0)
    )
    assert (result.requests, result.errors) == (80, 0)


def test_more_chats_begin_with_the_same_chats() -> None:
    few, many = open_trace("chats", requests=100), open_trace("chats", requests=5_000)
    assert len(many.requests) == 5_000 and many.requests[:100] == few.requests


def test_block_names_do_not_depend_on_how_a_prompt_is_cut() -> None:
    names = BlockNames(16)
    whole = names.ids([("a", 40), ("b", 20)])
    assert names.ids([("a", 40), ("b", 20), ("c", 5)])[:3] == whole[:3]
    assert names.ids([("a", 41), ("b", 19)])[2:] != whole[2:]  # the border moved
    assert names.ids([("a", 15)]) == ()


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 3.0])
def test_arrival_processes_have_their_rate_and_variation(variation: float) -> None:
    trace = retimed(strangers_trace(requests=20_000), ArrivalProcess(variation), seed=2)
    gaps = gaps_s(trace)
    assert mean(gaps) == pytest.approx(0.1, rel=0.08)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.08, abs=1e-6)


def test_retiming_keeps_the_requests() -> None:
    trace = open_trace("mooncake", requests=300)
    made = retimed(trace, ArrivalProcess(3.0), seed=1)
    assert [r.block_ids for r in made.requests] == [r.block_ids for r in trace.requests]
    assert made == retimed(trace, ArrivalProcess(3.0), seed=1) != retimed(trace, ArrivalProcess(3.0), seed=2)
    with pytest.raises(TraceError, match="turns of sessions follow their answers"):
        retimed(open_trace("chats", requests=10), ArrivalProcess(), seed=1)


@pytest.mark.parametrize("text", ["poison", "gamma", "gamma:x", "gamma:-1", "poisson:2", "gamma:inf"])
def test_processes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="expected poisson, or gamma:VARIATION"):
        ArrivalProcess.parse(text)


def test_bursts_hurt_at_the_same_mean_rate(capsys: pytest.CaptureFixture[str]) -> None:
    trace = strangers_trace(requests=1_500)
    settings = SimulationSettings()
    even, bursts = (
        simulate(retimed(trace, process, 1), ["least_loaded"], replicas=8, rate=2.0, settings=settings)[0]
        for process in (ArrivalProcess(1.0), ArrivalProcess(5.0))
    )
    assert even.ttft_s.p99 and bursts.ttft_s.p99 and bursts.ttft_s.p99 > 1.5 * even.ttft_s.p99
    arguments = ["simulate", "--trace", "strangers", "--requests", "50", "--arrivals", "gamma:4"]
    assert warmroute.main([*arguments, "--policy", "random", "--replicas", "2"]) == 0
    assert "strangers" in capsys.readouterr().out


def test_passages_in_one_order_share_more_than_in_any_order() -> None:
    mixed, ordered = (rag_trace(RagMix(sorted_passages=order), requests=1_000) for order in (False, True))
    assert ideal(ordered) > 1.3 * ideal(mixed)
    for one, other in zip(mixed.requests, ordered.requests, strict=True):
        assert (one.prompt_tokens, one.timestamp_ms) == (other.prompt_tokens, other.timestamp_ms)


def test_the_hot_prefix_comes_suddenly_and_takes_its_share() -> None:
    mix = HotPrefix(hot_from_s=40.0)
    trace = hot_prefix_trace(mix, requests=2_000)
    heads: dict[tuple[int, ...], list[float]] = {}
    for request in trace.requests:
        if len(request.block_ids) >= 128:
            heads.setdefault(request.block_ids[:128], []).append((request.timestamp_ms or 0.0) / 1e3)
    hot = max(heads.values(), key=len)
    later = sum((request.timestamp_ms or 0.0) >= 40_000.0 for request in trace.requests)
    assert min(hot) >= 40.0
    assert len(hot) / later == pytest.approx(0.6, abs=0.03)


def test_nothing_is_shared_by_strangers() -> None:
    assert ideal(strangers_trace(requests=500)) == 0.0


def test_trimming_costs_nearly_everything_but_the_system_prompt() -> None:
    trimmed, whole = (trimmed_chats_trace(TrimmedChats(limit), requests=600) for limit in (4_000, None))
    assert max(request.prompt_tokens for request in trimmed.requests) <= 4_000
    assert ideal(whole) > 0.85
    assert ideal(trimmed) < 0.75 * ideal(whole)
    for one, other in zip(trimmed.requests, whole.requests, strict=True):
        assert (one.output_tokens, one.session) == (other.output_tokens, other.session)
        if one.prompt_tokens == other.prompt_tokens:
            continue
        assert one.prompt_tokens < other.prompt_tokens


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_azure_files_are_read(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:50.9951690,600,109\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + rows)
    trace = read_azure_file(path)
    assert [request.prompt_tokens for request in trace.requests] == [374, 600]
    assert trace.requests[1].timestamp_ms == pytest.approx(4_314.579)
    assert len(trace.requests[1].block_ids) == 1
    packed = tmp_path / "azure.csv.gz"
    packed.write_bytes(gzip.compress(("\ufeff" + AZURE + rows).encode()))
    assert open_trace(str(packed), requests=1).requests[0].prompt_tokens == 374


def test_the_2024_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
    )
    assert read_azure_file(path).requests[1].timestamp_ms == pytest.approx(7.405, abs=0.01)


def test_azure_rows_without_tokens_are_read_as_one_and_said(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "2023-11-16 18:17:03,0,4\n2023-11-16 18:17:04,5,0\n2023-11-16 18:17:05,6,7\n")
    trace = read_azure_file(path)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(1, 4), (5, 1), (6, 7)]
    assert trace.remarks == ("2 rows have a prompt or an answer of no token: read as 1",)


def test_azure_times_are_the_same_in_every_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Berlin's clocks go back at 3:00 of that night: an hour would be told twice."""
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "2023-10-29 01:30:00,5,5\n2023-10-29 03:30:00,5,5\n")
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        assert [one.timestamp_ms for one in read_azure_file(path).requests] == [0.0, 7_200_000.0]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: columns are"),
        ("", "line 1: columns are None"),
        (AZURE, "no row; expected TIMESTAMP"),
        (
            AZURE + "2023-11-16 18:15:46,x,5\n",
            "line 2: 2023-11-16 18:15:46,x,5; expected a time and two whole",
        ),
        (AZURE + "2023-11-16 18:15:46,7\n", "line 2"),
        (AZURE + "\nyesterday,7,5\n", "line 3: TIMESTAMP is 'yesterday'"),
    ],
)
def test_bad_azure_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_azure_file(path)
