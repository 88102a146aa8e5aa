"""llama.cpp's server: metrics if it was started with ``--metrics``; its context in ``/props``.

A slot keeps the tokens of its last prompt, and takes the next one that shares a prefix with them: so many
tokens are what is cached. With ``--kv-unified`` slots share one context, and ``n_ctx`` is that of each and of
all: the figure here is then too large, and the index learns what is not there from ``cached_tokens`` in the
usage.
"""

from collections.abc import Mapping
from typing import Any

from replica.contract.load_report import LoadReport
from router.engines.engine import Engine, product, whole_number
from router.engines.metrics_page import MetricsPage


def load(page: MetricsPage) -> LoadReport:
    """The load report on a page.

    >>> report = load(MetricsPage("llamacpp:requests_processing 2\\nllamacpp:requests_deferred 5\\n"))
    >>> report.running, report.waiting, report.kv_usage
    (2, 5, None)
    """
    return LoadReport(
        running=page.whole("llamacpp:requests_processing"),
        waiting=page.whole("llamacpp:requests_deferred"),
        # Builds before the summer of 2025 have it.
        kv_usage=page.share("llamacpp:kv_cache_usage_ratio"),
    )


def info(page: Mapping[str, Any]) -> LoadReport:
    """What ``/props`` tells.

    >>> info({"default_generation_settings": {"n_ctx": 8_192}, "total_slots": 4}).capacity_tokens
    32768
    """
    settings, slots = page.get("default_generation_settings"), whole_number(page.get("total_slots"))
    context = whole_number(settings.get("n_ctx")) if isinstance(settings, dict) else None
    return LoadReport(capacity_tokens=product(context, slots))


ENGINE = Engine(
    kind="llamacpp",
    title="llama.cpp",
    load=load,
    owned_by="llamacpp",
    metric_prefix="llamacpp:",
    info_paths=("/props",),
    info=info,
)
