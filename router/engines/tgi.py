"""Text Generation Inference: metrics without the state of its KV cache; usage without cached tokens.

It names a model as its own owner, and a fresh server has no metrics yet: ``/info`` says who it is.
"""

from collections.abc import Mapping
from typing import Any

from replica.contract.load_report import LoadReport
from router.engines.engine import Engine, whole_number
from router.engines.metrics_page import MetricsPage


def load(page: MetricsPage) -> LoadReport:
    """The load report on a page.

    >>> report = load(MetricsPage("tgi_batch_current_size 4\\ntgi_queue_size 7\\n"))
    >>> report.running, report.waiting
    (4, 7)
    """
    return LoadReport(running=page.whole("tgi_batch_current_size"), waiting=page.whole("tgi_queue_size"))


def info(page: Mapping[str, Any]) -> LoadReport:
    """What ``/info`` tells: up to version 2 how many tokens a batch may hold, which is its KV cache.

    >>> info({"max_batch_total_tokens": 150_000}).capacity_tokens
    150000
    """
    return LoadReport(capacity_tokens=whole_number(page.get("max_batch_total_tokens")))


ENGINE = Engine(
    kind="tgi",
    title="TGI",
    load=load,
    metric_prefix="tgi_",
    info_paths=("/info",),
    info=info,
    info_marks={"router": "text-generation-router"},
)
