"""Any OpenAI-compatible server: tells nothing of its load, takes no field that OpenAI does not have."""

from replica.contract.load_report import LoadReport
from router.engines.engine import Engine
from router.engines.metrics_page import MetricsPage


def load(_: MetricsPage) -> LoadReport:
    """Nothing is known."""
    return LoadReport()


ENGINE = Engine(kind="openai", title="an OpenAI server", load=load, takes_salt=False)
