"""Our own replica: it uses vLLM's metric names."""

from router.engines.engine import Engine
from router.engines.vllm import load

ENGINE = Engine(
    kind="warmroute",
    title="warmroute replica",
    load=load,
    owned_by="warmroute",
    publishes_kv_events=True,
    parts_cache=True,
)
