"""``kind: auto``: which engine a replica runs, told by what it says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from router.engines import ENGINES
from router.engines.engine import Engine
from router.engines.metrics_page import MetricsPage


def recognized(models: Sequence[Mapping[str, Any]], page: MetricsPage) -> Engine | None:
    """By the owner of its models (``/v1/models``), else by the names of its metrics.

    >>> [engine.kind for engine in (
    ...     recognized([{"id": "m", "owned_by": "llamacpp"}], MetricsPage()),
    ...     recognized([{"id": "m", "owned_by": "me"}], MetricsPage("vllm:num_requests_running 0")),
    ... )]
    ['llamacpp', 'vllm']
    """
    owners = [model.get("owned_by") for model in models]
    by_owner = [one for one in ENGINES.values() if one.owned_by is not None and one.owned_by in owners]
    if len(by_owner) == 1:
        return by_owner[0]
    prefixed = (one for one in ENGINES.values() if one.metric_prefix and page.speaks(one.metric_prefix))
    return next(prefixed, None)


def recognized_by_info(engine: Engine, info: Mapping[str, Any]) -> bool:
    """Whether ``info``, the page where ``engine`` would tell of itself, is one of its own."""
    marks = engine.info_marks
    return marks is not None and all(info.get(name) == value for name, value in marks.items())
