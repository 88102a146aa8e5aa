"""The bound: one pool for all replicas."""

import random

from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from sim.pooled_cache import PooledCache
from sim.simulate import SimulationSettings, simulate
from sim.simulated_replica import ReplicaSettings
from sim.workload.sources import open_trace


def test_no_policy_beats_it_and_it_has_the_ideal_hits() -> None:
    trace = open_trace("mooncake")
    ours, bound = simulate(trace, ["predicted_finish", "pooled_cache"], replicas=8, rate=2.0)
    assert bound.errors == 0 and bound.cached_share and bound.ideal_cached_share
    assert 0.97 * bound.ideal_cached_share < bound.cached_share <= bound.ideal_cached_share
    for figure in ("ttft_s", "e2e_s"):
        assert getattr(bound, figure).mean < getattr(ours, figure).mean, figure


def test_a_pool_of_small_caches_serves_everybody() -> None:
    trace = open_trace("mooncake", requests=300)
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=60_000), warmup_share=0.0)
    (result,) = simulate(trace, ["pooled_cache"], replicas=4, rate=2.0, settings=settings)
    assert result.requests == 300 and result.errors == 0


def test_a_sequence_is_let_in_only_if_everybody_can_finish() -> None:
    """Schedulers step in any order; none of them ever runs out of blocks it could count on."""
    rng = random.Random(4)
    cache = PooledCache(40, 4)
    schedulers = [Scheduler(cache, SchedulerLimits(4, 32, 200)) for _ in range(3)]
    for number in range(120):
        prompt = rng.randrange(1, 60)
        ids = [rng.randrange(3) * 1_000 + k for k in range(prompt // 4)]
        sequence = Sequence.of_blocks(f"r{number}", ids, prompt, rng.randrange(1, 60), block_size=4)
        schedulers[number % 3].add(sequence)
    finished = 0
    while any(scheduler.has_work for scheduler in schedulers):
        scheduler = rng.choice([s for s in schedulers if s.has_work])
        steps = scheduler.steps_until_change()
        if steps and rng.random() < 0.5:
            finished += len(scheduler.advance_decodes(rng.randint(1, steps)))
            continue
        batch = scheduler.schedule()
        finished += len(scheduler.commit(batch))
    assert finished == 120
    assert sum(scheduler.preemptions for scheduler in schedulers) == 0
    assert cache.free_blocks == cache.blocks and cache._promised == 0
