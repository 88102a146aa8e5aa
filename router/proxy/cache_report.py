"""What is known of the replicas' caches, for ``/metrics``, ``/fleet`` and the log."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.proxy.counters import Counters, KvEventCounters
from router.routing.fleet import Fleet
from router.routing.replica_state import ReplicaState

log = logging.getLogger("warmroute.caches")

_KV_EVENTS = {
    "batches": "Batches of KV events applied.",
    "stored_events": "BlockStored events.",
    "removed_events": "BlockRemoved events.",
    "cleared_events": "AllBlocksCleared events.",
    "duplicates": "Batches that were applied before.",
    "gaps": "How often batches were missing.",
    "replayed": "Batches had by a replay.",
    "lost": "Missing batches that were given up.",
    "replay_failures": "Replays that were not answered in time.",
    "restarts": "How often the replica began to count its batches anew.",
    "reconnects": "How often the connection was made again.",
    "malformed": "Messages that are no batch of events.",
}

_BLOCKS = {
    "held_blocks": "Distinct KV blocks on the device, as the replica's events tell.",
    "telling": "1 while the replica's events are trusted.",
    "doubted": "1 while events are lost and the cache has not turned over since: part of it is guessed.",
    "translated": "1 if its block hashes are translated through tokens.",
    "announced": "Requests whose new blocks were announced.",
    "unannounced": "Requests whose new blocks were not (yet).",
    "unknown_parents": "Stored runs after a block that was not held.",
    "unknown_removals": "Removals of blocks that were not held.",
    "unnamed": "Events and hashes that could not be translated.",
    "overflows": "How often too many blocks were told of and all forgotten.",
    "unkept": "Blocks of slower tiers that were not kept, for want of room.",
}


def cache_metrics(fleet: Fleet, counters: Counters) -> Iterator[Metric]:
    """Metric families. Labels are replica names and reasons: bounded."""
    predicted = CounterMetricFamily(
        "warmroute_replica_predicted_cached_tokens",
        "Prompt tokens believed to be cached, of requests whose replica reported what was.",
        labels=["replica"],
    )
    cached = CounterMetricFamily(
        "warmroute_replica_cached_tokens", "Of the same requests, tokens that were.", labels=["replica"]
    )
    low = GaugeMetricFamily(
        "warmroute_replica_cache_credit_low",
        "1 while less than half of what is believed to be cached is: alert on it.",
        labels=["replica"],
    )
    for replica in fleet.replicas.staying:
        predicted.add_metric([replica.name], replica.credit.predicted_tokens)
        cached.add_metric([replica.name], replica.credit.cached_tokens)
        low.add_metric([replica.name], float(replica.credit.low))
    yield from (predicted, cached, low)
    yield CounterMetricFamily(
        "warmroute_exact_prompts", "Prompts read token by token.", value=counters.exact_prompts
    )
    fallbacks = CounterMetricFamily(
        "warmroute_text_fallbacks",
        "Prompts of a model in exact mode that were read as text, by reason.",
        labels=["reason"],
    )
    for reason, count in counters.text_fallbacks.items():
        fallbacks.add_metric([reason], count)
    yield fallbacks
    if counters.kv_events:
        yield from _event_metrics(fleet, counters)


def _event_metrics(fleet: Fleet, counters: Counters) -> Iterator[Metric]:
    for field in fields(KvEventCounters):
        family = CounterMetricFamily(
            f"warmroute_kv_events_{field.name}", _KV_EVENTS[field.name], labels=["replica"]
        )
        for name, one in counters.kv_events.items():
            family.add_metric([name], getattr(one, field.name))
        yield family
    for name, text in _BLOCKS.items():
        gauge = GaugeMetricFamily(f"warmroute_kv_blocks_{name}", text, labels=["replica"])
        for replica in fleet.replicas.staying:
            if replica.name in counters.kv_events:
                state = fleet.caches.exact.state(replica.index)
                gauge.add_metric([replica.name], float(getattr(state, name)))
        yield gauge


def cache_state(fleet: Fleet, counters: Counters, replica: ReplicaState) -> dict[str, Any]:
    """One replica's part of ``/fleet``."""
    credit, report = replica.credit, replica.last_report
    events = counters.kv_events.get(replica.name)
    return {
        "predicted_tokens": credit.predicted_tokens,
        "cached_tokens": credit.cached_tokens,
        "prompt_tokens": credit.prompt_tokens,
        "recent_ratio": credit.ratio,
        "alert": credit.low,
        "block_size": {
            "configured": replica.spec.blocks.block_tokens,
            "reported": None if report is None else report.block_size,
        },
        "blocks": asdict(fleet.caches.exact.state(replica.index)),
        "kv_events": None if events is None else asdict(events),
    }


class CacheWarnings:
    """Puts into the log, once, what the operator should know."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._low: set[ReplicaState] = set()

    def forget(self, replica: ReplicaState) -> None:
        """It is looked at no longer."""
        self._low.discard(replica)

    def look(self, replica: ReplicaState) -> None:
        """Log what is new, of this replica and of all blocks. Cheap: call it often."""
        notices = self._fleet.caches.exact.notices
        while notices:
            index, text = notices.popleft()
            told = self._fleet.replicas.by_index.get(index)
            if told is not None:
                log.warning("replica %s: %s", told.name, text)
        if not replica.credit.low:
            self._low.discard(replica)
        elif replica not in self._low:
            self._low.add(replica)
            log.warning(
                "replica %s: of the tokens believed to be cached only %.0f%% were, lately: the router reads "
                "prompts differently from the engine, or does not see its evictions",
                replica.name,
                100.0 * (replica.credit.ratio or 0.0),
            )
