"""What the data plane counts: plain numbers it adds to, read by ``/metrics`` and ``/fleet``."""

from collections.abc import Collection
from dataclasses import dataclass

from router.routing.in_flight import Usage

TTFT_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0,
)  # fmt: skip


class Histogram:
    """Counts per bucket; ``counts`` has one more than ``bounds`` for what is above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count ``value`` (the histogram's unit)."""
        bucket = 0
        for bound in self.bounds:  # most values are small: a search would look at more
            if value <= bound:
                break
            bucket += 1
        self.counts[bucket] += 1
        self.total += value


@dataclass(slots=True)
class KvEventCounters:
    """What came of one replica's KV events since start. Batches, unless named otherwise."""

    batches: int = 0
    """Applied, replayed ones included."""
    stored_events: int = 0
    removed_events: int = 0
    cleared_events: int = 0
    duplicates: int = 0
    gaps: int = 0
    """How often batches were missing."""
    replayed: int = 0
    """Had by a replay: the missing ones, and live ones that came meanwhile."""
    lost: int = 0
    """Of the missing, those given up."""
    replay_failures: int = 0
    """Replays that were not answered, or not in time."""
    restarts: int = 0
    """How often the replica began to count anew."""
    reconnects: int = 0
    """How often the connection to it was made again, and it was asked whether it is still the same."""
    malformed: int = 0
    """Messages or payloads that are no batch of events."""


class TenantCounters:
    """What one tenant's requests came to at this router since start."""

    __slots__ = (
        "cached_tokens",
        "output_tokens",
        "prompt_tokens",
        "statuses",
        "ttft_count",
        "ttft_total_s",
        "turned_away",
    )

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        """By status sent to the client; 499 is "client left"."""
        self.turned_away: dict[str, int] = {}
        """Of those, by the router's error code: limits, models, the hold queue's share."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.ttft_count = 0
        self.ttft_total_s = 0.0
        """Of streamed answers."""

    def count(self, status: int) -> None:
        """A request is over."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def turned(self, code: str) -> None:
        """It got an error of the router's own."""
        self.turned_away[code] = self.turned_away.get(code, 0) + 1

    def add_ttft(self, ttft_s: float) -> None:
        """A streamed answer's first token came."""
        self.ttft_count += 1
        self.ttft_total_s += ttft_s

    def add_usage(self, usage: Usage) -> None:
        """A whole answer told its tokens."""
        self.prompt_tokens += usage.prompt_tokens or 0
        self.cached_tokens += usage.cached_tokens or 0
        self.output_tokens += usage.output_tokens or 0


class Counters:
    """One router's counters since start. Labels are bounded: statuses, reasons, replica names."""

    def __init__(self) -> None:
        self._statuses: dict[str, dict[int, int]] = {}
        self._reasons: dict[str, dict[str, int]] = {}
        """Both by replica, or "" for nobody: a pair as a key would cost a tuple per request."""
        self.errors: dict[str, int] = {}
        """Router-made errors by code."""
        self.retries = 0
        self.handoffs = 0
        """Prompts that a prefill replica computed for another."""
        self.failed_handoffs = 0
        """Prompts that none could: whoever answers computes them."""
        self.kv_sources_named = 0
        self.client_disconnects = 0
        self.broken_streams = 0
        self.tokenless_streams = 0
        self.open_client_connections = 0
        self.receiving_bytes = 0
        """Of bodies that are not whole yet."""
        self.open_replica_connections = 0
        self.in_flight = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.first_byte_s = Histogram(TTFT_BUCKETS_S)
        self.kv_events: dict[str, KvEventCounters] = {}
        """By replica name; only where ``kv_events`` is configured."""
        self.request_log_dropped = 0
        """Rows of the request log that could not be written, or not in time."""
        self.spans_sent = 0
        self.spans_lost = 0
        """Spans that a collector did not take."""
        self.exact_prompts = 0
        """Prompts read token by token."""
        self.text_fallbacks: dict[str, int] = {}
        """Prompts of a model in exact mode that had to be read as text, by reason."""
        self.decision_s = Histogram((10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 1e-3, 5e-3))
        self.reloads = 0
        """Configs applied after the first."""
        self.tenants: dict[str, TenantCounters] = {}
        """By name."""
        self.failed_tenant_files = 0
        """Changes of the tenants' file that were refused."""
        self.failed_reloads = 0
        """Configs that were refused."""

    def answered(self, replica: str, status: int) -> None:
        """A request is over. ``replica``: who answered, or ""; ``status``: what the client got."""
        statuses = self._statuses.get(replica)
        if statuses is None:
            statuses = self._statuses[replica] = {}
        statuses[status] = statuses.get(status, 0) + 1

    def decided(self, replica: str, reason: str) -> None:
        """A request is sent to ``replica``, for ``reason``."""
        reasons = self._reasons.get(replica)
        if reasons is None:
            reasons = self._reasons[replica] = {}
        reasons[reason] = reasons.get(reason, 0) + 1

    @property
    def requests(self) -> dict[tuple[str, int], int]:
        """By (replica name or "", status sent to the client); 499 is "client left"."""
        return {(name, key): count for name, row in self._statuses.items() for key, count in row.items()}

    @property
    def decisions(self) -> dict[tuple[str, str], int]:
        """By (replica name, reason)."""
        return {(name, key): count for name, row in self._reasons.items() for key, count in row.items()}

    def keep_tenants(self, names: Collection[str]) -> None:
        """These tenants there are; rows of others go."""
        for name in names:
            self.tenants.setdefault(name, TenantCounters())
        for name in [name for name in self.tenants if name not in names]:
            del self.tenants[name]

    def forget_replica(self, name: str) -> None:
        """The replica is no longer in the fleet: neither are its rows."""
        self._statuses.pop(name, None)
        self._reasons.pop(name, None)
        self.kv_events.pop(name, None)
