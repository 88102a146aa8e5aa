"""vLLM: all is on its metrics page, the size of its KV cache as labels of ``vllm:cache_config_info``."""

from replica.contract.load_report import LoadReport
from router.engines.engine import Engine, product, whole_number
from router.engines.metrics_page import MetricsPage

_DIGITS = 16
"""Of a count in a label; no longer one is read."""


def load(page: MetricsPage) -> LoadReport:
    """The load report on a page; what is not there stays ``None``.

    >>> page = 'vllm:num_requests_running{model_name="m"} 3.0\\n'
    >>> page += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\\n'
    >>> report = load(MetricsPage(page))
    >>> report.running, report.waiting, report.capacity_tokens
    (3, None, 16000)
    """
    block_size: int | None = None
    capacity = 0
    hash_algorithm: str | None = None
    cache_salts: str | None = None
    memory_share: float | None = None
    for config in page.labels("vllm:cache_config_info"):
        hash_algorithm = config.get("prefix_caching_hash_algo") or hash_algorithm
        cache_salts = config.get("cache_salts") or cache_salts
        memory_share = _share(config.get("gpu_memory_utilization", "")) or memory_share
        size, blocks = _count(config.get("block_size", "")), _count(config.get("num_gpu_blocks", ""))
        tokens = product(size, blocks)
        if tokens is not None:
            block_size = size
            capacity += tokens
    usage = page.share("vllm:kv_cache_usage_perc")
    return LoadReport(
        running=page.whole("vllm:num_requests_running"),
        waiting=page.whole("vllm:num_requests_waiting"),
        # Its name up to 0.10.
        kv_usage=page.share("vllm:gpu_cache_usage_perc") if usage is None else usage,
        prefix_queried_tokens=page.sum("vllm:prefix_cache_queries"),
        prefix_hit_tokens=page.sum("vllm:prefix_cache_hits"),
        capacity_tokens=whole_number(capacity),
        memory_share=memory_share,
        block_size=block_size,
        hash_algorithm=hash_algorithm,
        cache_salts=cache_salts,
    )


def _count(text: str) -> int | None:
    return whole_number(int(text)) if len(text) <= _DIGITS and text.isdecimal() else None


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 < value <= 1.0 else None


ENGINE = Engine(
    kind="vllm",
    title="vLLM",
    load=load,
    owned_by="vllm",
    metric_prefix="vllm:",
    publishes_kv_events=True,
    parts_cache=True,
    # As of 0.33 (entrypoints/speech_to_text): a form of these has no field for it.
    unparted_paths=("/v1/audio/transcriptions", "/v1/audio/translations"),
)
