"""SGLang: metrics with ``--enable-metrics``; the size of its KV cache there or in ``/server_info``.

``sglang:token_usage`` is the share of KV tokens that requests hold: what the radix cache could evict is not
in it. Usage tells cached tokens with ``--enable-cache-report``.
"""

from collections.abc import Mapping
from typing import Any

from replica.contract.load_report import LoadReport
from router.engines.engine import Engine, product, whole_number
from router.engines.metrics_page import MetricsPage


def load(page: MetricsPage) -> LoadReport:
    """The load report on a page.

    >>> report = load(MetricsPage('sglang:num_running_reqs{model_name="m"} 3.0\\nsglang:token_usage 0.5\\n'))
    >>> report.running, report.kv_usage, report.waiting
    (3, 0.5, None)
    """
    return LoadReport(
        running=page.whole("sglang:num_running_reqs"),
        waiting=page.whole("sglang:num_queue_reqs"),
        kv_usage=page.share("sglang:token_usage"),
        prefix_queried_tokens=page.sum("sglang:prompt_tokens"),
        prefix_hit_tokens=page.sum("sglang:cached_tokens"),
        capacity_tokens=page.whole("sglang:max_total_num_tokens") or None,
        block_size=page.largest("sglang:page_size") or None,
    )


def info(page: Mapping[str, Any]) -> LoadReport:
    """What ``/server_info`` tells: the size of the KV cache of one rank, and how many ranks have one.

    >>> info({"max_total_num_tokens": 400_000, "page_size": 1, "dp_size": 2}).capacity_tokens
    800000
    """
    ranks = whole_number(page.get("dp_size")) or 1
    return LoadReport(
        capacity_tokens=product(whole_number(page.get("max_total_num_tokens")), ranks),
        block_size=whole_number(page.get("page_size")),
    )


ENGINE = Engine(
    kind="sglang",
    title="SGLang",
    load=load,
    owned_by="sglang",
    metric_prefix="sglang:",
    info_paths=("/server_info", "/get_server_info"),
    info=info,
    publishes_kv_events=True,
    parts_cache=True,
    # As of 0.5.23 (entrypoints/openai/protocol.py, entrypoints/anthropic/protocol.py): fields of these
    # requests that it does not know it passes over.
    unparted_paths=(
        "/v1/messages",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/v1/decisions",
        "/v1/systemone",
        "/v1/audio/transcriptions",
    ),
)
