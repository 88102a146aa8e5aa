"""The /metrics page, with the names and meanings of vLLM's."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from replica.engine_limits import EngineLimits
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.kv_cache.tier_settings import TierCounters
from replica.peers.source_rule import SourceCounters
from replica.server.engine_thread import EngineThread
from replica.server.peer_metrics import LABELS, PeerCollector
from replica.server.served_counters import ServedCounters
from replica.server.stranded_tokens import StrandedTokens

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class ReplicaMetrics:
    """Counts what the server sees; reads the rest from the engine's last load report when scraped."""

    def __init__(
        self,
        model_name: str,
        thread: EngineThread,
        limits: EngineLimits,
        sources: SourceCounters | None = None,
        served: ServedCounters | None = None,
        *,
        cache_salts: str = "none",
    ) -> None:
        """``sources``, ``served``: what is counted of peers, where there are any; ``cache_salts``: as
        ``SaltRule.accept``, told to routers."""
        self._registry = CollectorRegistry()
        self._stranded = StrandedTokens(thread)
        self._registry.register(_EngineCollector(model_name, thread, limits, self._stranded, cache_salts))
        self._registry.register(PeerCollector((model_name, "0"), sources, served))
        values = (model_name, "0")

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self._registry).labels(*values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
            return family.labels(*values)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._output_tokens = counter("vllm:generation_tokens", "Number of generation tokens processed.")
        self._finished = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*values, reason)
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", TTFT_BUCKETS_S
        )
        self._between_tokens = histogram(
            "vllm:inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            BETWEEN_TOKENS_BUCKETS_S,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            TTFT_BUCKETS_S,
        )
        self._values = values

    def first_tokens(self, prompt_tokens: int, tokens: int, seconds: float) -> None:
        """A sequence has its first tokens, so long after its request arrived."""
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(tokens)
        self._ttft.observe(seconds)

    def more_tokens(self, tokens: int, seconds: float) -> None:
        """A sequence has more tokens, so long after the ones before."""
        self._output_tokens.inc(tokens)
        if tokens:
            self._between_tokens.observe(seconds / tokens)

    def finished(self, reason: str, seconds: float) -> None:
        """A sequence ended, so long after its request arrived."""
        self._finished.labels(*self._values, reason).inc()
        self._e2e.observe(seconds)

    async def page(self) -> bytes:
        """The page in Prometheus' text form."""
        await self._stranded.look()
        return generate_latest(self._registry)


class _EngineCollector:
    """Gauges and counters that the engine keeps itself."""

    def __init__(
        self,
        model_name: str,
        thread: EngineThread,
        limits: EngineLimits,
        stranded: StrandedTokens,
        cache_salts: str,
    ) -> None:
        self._stranded = stranded
        self._cache_salts = cache_salts
        self._values = (model_name, "0")
        self._thread = thread
        self._limits = limits

    def collect(self) -> Iterable[Metric]:
        """One sample of each."""
        load, limits = self._thread.load, self._limits
        gauges = (
            ("vllm:num_requests_running", "Number of requests in model execution batches.", load.running),
            (
                "vllm:num_requests_waiting",
                "Number of requests waiting to be processed.",
                (load.waiting or 0) + self._thread.handed_over,
            ),
            ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", load.kv_usage),
            (
                "warmroute:kv_stranded_tokens",
                "Tokens whose KV is resident but can never be hit, for want of the KV before it: "
                "0 unless the cache has a fault.",
                self._stranded.tokens,
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, float(value or 0))
            yield gauge
        counters = (
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                load.prefix_queried_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                load.prefix_hit_tokens,
            ),
            (
                "vllm:num_preemptions",
                "Cumulative number of preemption from the engine.",
                self._thread.preemptions,
            ),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._values, float(value or 0))
            yield counter
        if (tiers := self._thread.tier_counters) is not None:
            yield from self._of_tiers(tiers)
        if (states := self._thread.states) is not None:
            yield from self._of_states(states)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=(
                *("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
                *("prefix_caching_hash_algo", "cache_salts"),
            ),
        )
        size, blocks, caches = str(limits.block_size), str(limits.kv_blocks), str(limits.prefix_caching)
        info.add_metric(("0", size, blocks, caches, "warmroute", self._cache_salts), 1.0)
        yield info

    def _of_states(self, states: StateCheckpoints) -> Iterable[Metric]:
        slots = GaugeMetricFamily(
            "warmroute:state_slots", "Slots for recurrent states, by what they hold.", labels=(*LABELS, "use")
        )
        inventory = states.inventory()
        for use in ("live", "checkpoints", "free"):
            slots.add_metric((*self._values, use), float(getattr(inventory, use)))
        yield slots
        outcomes = CounterMetricFamily(
            "warmroute:state_checkpoints",
            "What became of checkpoints of recurrent states.",
            labels=(*LABELS, "outcome"),
        )
        for outcome in ("published", "not_exact", "no_slot", "restored", "evicted"):
            outcomes.add_metric((*self._values, outcome), float(getattr(states.counters, outcome)))
        yield outcomes

    def _of_tiers(self, tiers: TierCounters) -> Iterable[Metric]:
        fetched = CounterMetricFamily(
            "warmroute:kv_tier_fetched_blocks", "KV blocks that came back.", labels=(*LABELS, "medium")
        )
        for tier, blocks in tiers.fetched.items():
            fetched.add_metric((*self._values, tier.value), float(blocks))
        yield fetched
        outcomes = CounterMetricFamily(
            "warmroute:kv_tier_outcomes",
            "What else became of KV blocks below the device, and of fetches that ended early.",
            labels=(*LABELS, "outcome"),
        )
        for outcome in (
            *("saved", "not_saved", "spilled", "over_budget", "lost", "recomputed", "corrupt"),
            *("late_fetches", "failed_fetches", "gone"),
        ):
            outcomes.add_metric((*self._values, outcome), float(getattr(tiers, outcome)))
        yield outcomes
