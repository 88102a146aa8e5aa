"""What the routing core needs from the config."""

from dataclasses import dataclass, field

from router.routing.health import HealthSettings


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Plain values; times in seconds."""

    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    default_capacity_tokens: int = 1_000_000
    """KV tokens a replica is taken to hold until it says."""
    expected_output_tokens: float = 256.0
    """Reply length assumed before any was seen."""
    hold: bool = False
    """Requests wait in the router while their replica has one without a first token (``holding.py``)."""
    hold_asked: bool = False
    """Those that ask for another policy than the fleet's wait, too."""
    guard_caches: bool = False
    """They also wait where sending them would cost the others more hits (``cache_guard.py``)."""
    exact: bool = False
    """Prompts read token by token will come (``exact_index.py``)."""
    health: HealthSettings = field(default_factory=HealthSettings)
