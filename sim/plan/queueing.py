"""Waiting times: one queue per replica (M/G/1) or one for all of them (M/G/n).

A request that comes to a replica busy for the share ``rho`` of its time waits longer than t with probability
``rho * exp(-t (1 - rho) / residual)``, where ``residual = E[S^2] / (2 E[S])`` is the mean remaining work of
the request that it meets: exact for exponential service, close for others (and its mean is Pollaczek's and
Khinchine's, exact). With one queue for n replicas, Erlang's C takes the place of ``rho``.
"""

from math import exp


def erlang_c(servers: float, offered: float) -> float:
    """The chance to wait in one queue for ``servers`` servers when ``offered`` of them are busy, mean.

    One server: its utilization. Two servers at 50% each: 1 / 3.

    >>> erlang_c(1, 0.7), round(erlang_c(2, 1.0), 4), erlang_c(2, 2.5)
    (0.7, 0.3333, 1.0)
    """
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion over servers
    for count in range(1, int(servers) + 1):
        blocked = offered * blocked / (count + offered * blocked)
    utilization = offered / int(servers)
    return blocked / (1.0 - utilization * (1.0 - blocked))


def late_share(servers: float, offered: float, budget: float, residual: float) -> float:
    """Of requests, those that wait longer than ``budget`` in one queue for all servers.

    >>> round(late_share(1, 0.5, 100.0, 50.0), 4)                       # 0.5 * exp(-100 * 0.5 / 50)
    0.1839
    """
    if offered >= servers:
        return 1.0
    return erlang_c(servers, offered) * exp(-max(0.0, budget) * (servers - offered) / residual)


def smallest_pool(offered: float, budget: float, residual: float, late: float) -> int:
    """The fewest servers behind one queue of whose requests at most the share ``late`` wait too long.

    >>> smallest_pool(3.2, 1_000.0, 40.0, 0.05)
    4
    """
    servers = int(offered) + 1
    while late_share(servers, offered, budget, residual) > late:
        servers += 1
    return servers


def most_offered(servers: int, budget: float, residual: float, late: float) -> float:
    """The most work for servers behind one queue of whose requests at most ``late`` wait too long.

    >>> round(most_offered(1, 100.0, 50.0, 0.1839), 3)
    0.5
    """
    low, high = 0.0, float(servers)
    for _ in range(60):
        middle = (low + high) / 2.0
        if late_share(servers, middle, budget, residual) <= late:
            low = middle
        else:
            high = middle
    return low
