"""One simulated replica: queueing theory, Little's law, decode runs against single steps."""

import random
from itertools import pairwise
from math import inf

import pytest

from replica.kv_cache.prefix_cache import PrefixCache
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from sim.event_queue import EventQueue
from sim.simulate import SimulationSettings, simulate
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica
from sim.step_time.linear import LinearStepTime
from sim.step_time.step_time import cold_prefill_s
from sim.workload.trace import Trace
from tests.sim.traces import poisson

ONE_AT_A_TIME = ReplicaSettings(max_running=1, max_batched_tokens=100_000, prefix_caching=False)


def mean_ttft_s(trace: Trace, step_time: LinearStepTime) -> float:
    settings = SimulationSettings(replica=ONE_AT_A_TIME, step_time=step_time, warmup_share=0.1)
    (result,) = simulate(trace, ["round_robin"], replicas=1, settings=settings)
    assert result.errors == 0 and result.cached_share == 0.0 and result.ttft_s.mean is not None
    assert result.ttft_s == result.e2e_s  # one output token
    return result.ttft_s.mean


@pytest.mark.parametrize("load", [0.5, 0.75])
def test_waiting_time_of_m_d_1(load: float) -> None:
    """Poisson arrivals, one length: mean wait = load * service / (2 (1 - load))  (Pollaczek-Khinchine)."""
    step_time = LinearStepTime(step_s=0.010, decode_sequence_s=0.0, prefill_token_s=100e-6)
    service_s = cold_prefill_s(step_time, 1_000, 100_000)
    traces = [poisson(8_000, service_s / load, [1_000], seed=seed) for seed in range(1, 5)]
    wait_s = sum(mean_ttft_s(trace, step_time) for trace in traces) / len(traces) - service_s
    assert wait_s == pytest.approx(load * service_s / (2.0 * (1.0 - load)), rel=0.05)


def test_waiting_time_of_m_m_1() -> None:
    """Exponential service times: mean wait = load * service / (1 - load), twice that of M/D/1."""
    step_time = LinearStepTime(1e-9, 0.0, 100e-6, attention_tokens=inf)
    rng = random.Random(2)
    lengths = [1 + int(rng.expovariate(1 / 1_000)) for _ in range(20_000)]
    service_s = 100e-6 * sum(lengths) / len(lengths)
    wait_s = mean_ttft_s(poisson(20_000, service_s / 0.6, lengths, seed=3), step_time) - service_s
    assert wait_s == pytest.approx(0.6 * service_s / 0.4, rel=0.06)


def test_every_wait_follows_lindley() -> None:
    """One server, first come first served: wait' = max(0, wait + service - gap), request by request."""
    step_time = LinearStepTime(1e-9, 0.0, 100e-6, attention_tokens=inf)
    rng = random.Random(5)
    lengths = [1 + int(rng.expovariate(1 / 1_000)) for _ in range(500)]
    trace = poisson(500, 0.12, lengths, seed=6)
    wait_s, sojourns_s = 0.0, []
    for before, request in pairwise(trace.requests):
        service_s = 1e-9 + 100e-6 * before.prompt_tokens
        sojourns_s.append(wait_s + service_s)
        gap_s = ((request.timestamp_ms or 0.0) - (before.timestamp_ms or 0.0)) / 1e3
        wait_s = max(0.0, wait_s + service_s - gap_s)
    sojourns_s.append(wait_s + 1e-9 + 100e-6 * trace.requests[-1].prompt_tokens)
    settings = SimulationSettings(replica=ONE_AT_A_TIME, step_time=step_time, warmup_share=0.0)
    (result,) = simulate(trace, ["round_robin"], replicas=1, settings=settings)
    assert result.ttft_s.mean == pytest.approx(sum(sojourns_s) / 500, rel=1e-9)
    assert result.ttft_s.p99 == pytest.approx(sorted(sojourns_s)[495], rel=1e-9)


class Site:
    """One replica with a log of what it reported."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.queue = EventQueue()
        self.sent: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.end: dict[str, float] = {}
        self.refused: list[str] = []
        self.replica = SimulatedReplica(
            scheduler,
            LinearStepTime(0.008, 60e-6, 62.5e-6, decode_context_token_s=1e-7),
            self.queue,
            ReplicaEvents(
                lambda sequence: self.first.update({sequence.request_id: self.queue.now}),
                lambda sequence: self.end.update({sequence.request_id: self.queue.now}),
                lambda sequence: self.refused.append(sequence.request_id),
            ),
        )

    def send(self, at_s: float, name: str, ids: list[int], prompt_tokens: int, output_tokens: int) -> None:
        sequence = Sequence.of_blocks(name, ids, prompt_tokens, output_tokens, block_size=16)
        self.sent[name] = at_s
        self.queue.at(at_s, self.replica.accept, sequence)


class StepByStep(Scheduler):
    """The same scheduler without the short cut."""

    def steps_until_change(self) -> int:
        return 0


def traffic(site: Site, requests: int, seed: int, gap_s: float) -> None:
    rng = random.Random(seed)
    at_s = 0.0
    for number in range(requests):
        at_s += rng.expovariate(1.0 / gap_s)
        shared, own = rng.randrange(0, 8), rng.randrange(0, 6)
        ids = [
            *range(100 * (shared % 3), 100 * (shared % 3) + shared),
            *range(10**6 + 50 * number, 10**6 + 50 * number + own),
        ]
        prompt_tokens = max(1, 16 * len(ids) + rng.randrange(16))
        site.send(at_s, f"r{number}", ids[: prompt_tokens // 16], prompt_tokens, rng.randrange(1, 120))


@pytest.mark.parametrize(("blocks", "max_running", "gap_s"), [(400, 8, 0.1), (40, 8, 0.1), (400, 3, 0.05)])
def test_decode_runs_are_the_same_as_single_steps(blocks: int, max_running: int, gap_s: float) -> None:
    limits = SchedulerLimits(max_running=max_running, max_batched_tokens=64, max_model_len=2_000)
    sites = [Site(kind(PrefixCache(blocks, 16), limits)) for kind in (Scheduler, StepByStep)]
    for site in sites:
        traffic(site, 150, seed=blocks, gap_s=gap_s)
        site.queue.run()
    fast, slow = sites
    assert len(slow.end) == 150
    assert fast.first == pytest.approx(slow.first, rel=1e-9)
    assert fast.end == pytest.approx(slow.end, rel=1e-9)


def test_littles_law() -> None:
    """Mean number in the replica = arrival rate x mean time there."""
    site = Site(Scheduler(PrefixCache(4_000, 16), SchedulerLimits(16, 512, 2_000)))
    traffic(site, 3_000, seed=1, gap_s=0.09)
    numbers: list[int] = []

    def look() -> None:
        report = site.replica.load()
        assert report.running is not None and report.waiting is not None
        numbers.append(report.running + report.waiting)
        if len(site.end) < 3_000:
            site.queue.at(site.queue.now + 0.05, look)

    site.queue.at(0.0, look)
    site.queue.run()
    horizon_s = max(site.end.values())
    in_system_s = sum(site.end[name] - site.sent[name] for name in site.sent)
    assert sum(numbers) / len(numbers) == pytest.approx(in_system_s / horizon_s, rel=0.03)
    assert sum(numbers) / len(numbers) > 3.0


def test_an_arrival_waits_for_the_running_step_and_no_longer() -> None:
    site = Site(Scheduler(PrefixCache(400, 16), SchedulerLimits(8, 512, 2_000)))
    site.send(0.0, "long", [], 10, 1_000)
    site.send(1.0, "late", [], 10, 1)
    site.queue.run()
    step_s = 0.008 + 60e-6  # and a little for the context
    assert step_s < site.first["late"] - 1.0 < 2.2 * step_s + 20 * 62.5e-6
    assert site.end["long"] == pytest.approx(1_000 * (step_s + 510e-7), rel=0.01)


def test_who_can_never_fit_is_refused_and_others_go_on() -> None:
    site = Site(Scheduler(PrefixCache(10, 16), SchedulerLimits(8, 512, 2_000)))
    site.send(0.0, "fits", list(range(6)), 100, 10)
    site.send(0.001, "too long", list(range(12)), 200, 10)
    site.queue.run()
    assert site.refused == ["too long"] and set(site.end) == {"fits"}


def test_a_cache_smaller_than_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="capacity of 100 tokens: less than one block of 512"):
        ReplicaSettings(capacity_tokens=100).scheduler(512)
