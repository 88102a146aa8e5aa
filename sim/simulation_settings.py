"""Everything about a simulated run but its trace, policies, number of replicas, rate and seed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from router.routing.prompt_blocks import Prompt
from sim.fleet_change import FleetChange
from sim.kv_event_feed import KvEventSettings
from sim.results import Slo
from sim.simulated_replica import ReplicaSettings
from sim.step_time.presets import PRESETS
from sim.step_time.step_time import StepTime
from sim.two_pools import KvMoves
from sim.workload.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The defaults are the benchmark's: equal replicas, one router, no events, no distance."""

    replica: ReplicaSettings = field(default_factory=ReplicaSettings)
    unlike: tuple[tuple[int, ReplicaSettings], ...] = ()
    """Replicas, by position, that are not like ``replica``."""
    step_time: StepTime = PRESETS["emufleet"]
    slo: Slo = field(default_factory=Slo)
    hold: bool = True
    """As the router does by default: under the policy ``predicted_finish`` requests wait in the router while
    their replica has enough to prefill. Several routers hold if they know of one another."""
    guard_caches: bool = False
    """Requests also wait where those that run fill so much of the KV memory that hits are lost."""
    network_delay_s: float = 0.0
    """One way, between router and replica."""
    report_interval_s: float = 2.0
    """How often replicas are probed and report their load; the router's probe interval."""
    report_lag_s: float = 0.0
    """How old a report is when the router has it."""
    warmup_share: float = 0.25
    """Of the time in which requests are sent; those sent in it are not measured."""
    mean_think_s: float = 1.0
    """Pause before a turn of a session whose trace tells none; exponential."""
    changes: tuple[FleetChange, ...] = ()
    """What happens to replicas meanwhile."""
    routers: int = 1
    """Requests come to one of them at random."""
    peer_lag_s: float | None = None
    """After so long every router knows what the others sent; ``None``: each knows its own requests only."""
    kv_events: KvEventSettings | None = None
    """``None``: no events, the router mirrors what it sent."""
    tell_max_tokens: bool = False
    """Requests tell how long their answer will be (``max_tokens``), exactly."""
    read_prompt: Callable[[TraceRequest], Prompt] | None = None
    """How routers read a prompt's text, where there is one; ``None``: they see the trace's own blocks."""
    ties_seed: int | None = None
    """``seed`` in a real router's config, to break ties as that one does; ``None``: made from the run's."""
    true_costs: bool = False
    """Routers know from the start what prefill and decode cost on each replica."""
    kv_moves: KvMoves | None = None
    """``None``: every replica computes what it lacks."""

    def all_replicas(self, replicas: int) -> int:
        """With the decode pool, if there is one."""
        return replicas + (0 if self.kv_moves is None else self.kv_moves.decode_replicas)

    @property
    def one_queue_each(self) -> bool:
        """What waits for a replica is known to all routers: requests may be held."""
        return self.routers == 1 or self.peer_lag_s is not None

    def replica_settings(self, replica: int) -> ReplicaSettings:
        """What the replica at that position can do."""
        return dict(self.unlike).get(replica, self.replica)
