"""Waiting times against textbook values and against queues that are simulated."""

import heapq
import random

import pytest

from sim.plan.queueing import erlang_c, late_share, most_offered, smallest_pool


@pytest.mark.parametrize(
    ("servers", "offered", "chance"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (5, 4.0, 0.5541), (10, 8.0, 0.4092), (4, 4.0, 1.0)],
)
def test_erlang_c(servers: int, offered: float, chance: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(chance, abs=1e-4)


def waits(
    servers: int, rate: float, service: float, *, exponential: bool, count: int = 200_000
) -> list[float]:
    """Waits in one queue for several servers, first come, first served."""
    rng = random.Random(7)
    free = [0.0] * servers
    now, found = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        found.append(start - now)
        heapq.heappush(free, start + (rng.expovariate(1 / service) if exponential else service))
    return found[count // 10 :]


@pytest.mark.parametrize(("servers", "rho"), [(1, 0.5), (1, 0.8), (4, 0.7)])
def test_exponential_service_is_exact(servers: int, rho: float) -> None:
    service = 2.0  # its residual is its mean
    found = waits(servers, servers * rho / service, service, exponential=True)
    mean = erlang_c(servers, servers * rho) * service / (servers - servers * rho)
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.08)
    for budget in (0.0, service, 3 * service):
        late = sum(wait > budget for wait in found) / len(found)
        assert late == pytest.approx(late_share(servers, servers * rho, budget, service), abs=0.015)


def test_constant_service_waits_half_as_long() -> None:
    service, rho = 2.0, 0.8
    found = waits(1, rho / service, service, exponential=False)
    pollaczek = rho / (1 - rho) * (service / 2)  # E[S^2] / (2 E[S]) is half the service
    assert sum(found) / len(found) == pytest.approx(pollaczek, rel=0.08)


def test_the_smallest_pool_is_smallest() -> None:
    for offered in (0.1, 0.95, 3.2, 40.0):
        size = smallest_pool(offered, 800.0, 300.0, 0.05)
        assert late_share(size, offered, 800.0, 300.0) <= 0.05
        assert size - 1 <= offered or late_share(size - 1, offered, 800.0, 300.0) > 0.05


def test_no_budget_means_finding_a_free_server() -> None:
    size = smallest_pool(3.0, -50.0, 300.0, 0.05)
    assert erlang_c(size, 3.0) <= 0.05 < erlang_c(size - 1, 3.0)
    assert most_offered(1, -50.0, 300.0, 0.05) == pytest.approx(0.05)
