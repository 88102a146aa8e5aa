"""A replica's ``/metrics`` page (vLLM's names, which our replica uses too) -> ``LoadReport``."""

import re

from replica.contract.load_report import LoadReport

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_load_report(text: str) -> LoadReport:
    """The load report on a Prometheus text page; what is not there stays ``None``.

    Engines with data parallelism show one sample per rank: counts add up, shares are averaged.

    >>> page = 'vllm:num_requests_running{model_name="m"} 3.0\\n'
    >>> page += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\\n'
    >>> report = parse_load_report(page)
    >>> report.running, report.waiting, report.capacity_tokens
    (3, None, 16000)
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    block_size: int | None = None
    capacity: int | None = None
    hash_algorithm: str | None = None
    for name, labels, value in _SAMPLE.findall(text):
        if not name.startswith("vllm:"):
            continue
        if name == "vllm:cache_config_info":
            fields = dict(_LABEL.findall(labels))
            hash_algorithm = fields.get("prefix_caching_hash_algo") or hash_algorithm
            size, blocks = fields.get("block_size", ""), fields.get("num_gpu_blocks", "")
            if size.isdigit() and blocks.isdigit() and int(size) > 0:
                block_size = int(size)
                capacity = (capacity or 0) + int(size) * int(blocks)
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if number != number or number in (float("inf"), float("-inf")):
            continue
        key = name.removesuffix("_total")
        sums[key] = sums.get(key, 0.0) + number
        counts[key] = counts.get(key, 0) + 1
    usage = sums.get("vllm:kv_cache_usage_perc", sums.get("vllm:gpu_cache_usage_perc"))
    ranks = counts.get("vllm:kv_cache_usage_perc", counts.get("vllm:gpu_cache_usage_perc", 1))
    running, waiting = sums.get("vllm:num_requests_running"), sums.get("vllm:num_requests_waiting")
    return LoadReport(
        running=None if running is None else int(running),
        waiting=None if waiting is None else int(waiting),
        kv_usage=None if usage is None else usage / ranks,
        prefix_queried_tokens=sums.get("vllm:prefix_cache_queries"),
        prefix_hit_tokens=sums.get("vllm:prefix_cache_hits"),
        capacity_tokens=capacity or None,
        block_size=block_size,
        hash_algorithm=hash_algorithm,
    )
