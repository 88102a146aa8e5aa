"""What the router must know of one kind of inference server beside OpenAI's routes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replica.contract.load_report import LoadReport
from router.engines.metrics_page import LARGEST, MetricsPage


def _tells_nothing(_: Mapping[str, Any]) -> LoadReport:
    return LoadReport()


@dataclass(frozen=True, slots=True)
class Engine:
    """One kind of server. All of them answer ``GET /health`` and OpenAI's ``GET /v1/models``."""

    kind: str
    """As in the config."""
    title: str
    """For people."""
    load: Callable[[MetricsPage], LoadReport]
    """What its ``/metrics`` say."""
    owned_by: str | None = None
    """Who owns its models, by ``/v1/models``."""
    metric_prefix: str | None = None
    """How the names of its metrics begin."""
    info_paths: tuple[str, ...] = ()
    """Where it tells what its metrics may not; the first that answers with a JSON object."""
    info: Callable[[Mapping[str, Any]], LoadReport] = _tells_nothing
    """What it tells there."""
    info_marks: Mapping[str, str] | None = None
    """Fields by which that page can be known for its own, where nothing else tells."""
    publishes_kv_events: bool = False
    parts_cache: bool = False
    """``cache_salt`` keeps prefixes apart in its cache; False: tenants share it."""
    unparted_paths: tuple[str, ...] = ()
    """Where it reads none although ``parts_cache``: tenants share what is cached of these requests."""
    takes_salt: bool = True
    """A request may carry ``cache_salt``; False: it may be refused for a field that OpenAI does not have."""


def product(*factors: int | None) -> int | None:
    """Of positive counts; ``None`` where one of them, or what comes out, is none."""
    result = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return whole_number(result)


def whole_number(value: Any) -> int | None:
    """A positive count from a JSON page, else ``None``."""
    return value if type(value) is int and 0 < value <= LARGEST else None
