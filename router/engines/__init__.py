"""The table of engines: a dict from ``kind`` to what is known of it is the whole registry."""

from router.engines import llamacpp, openai, sglang, tgi, vllm, warmroute
from router.engines.engine import Engine

ENGINES: dict[str, Engine] = {
    module.ENGINE.kind: module.ENGINE for module in (vllm, sglang, llamacpp, tgi, warmroute, openai)
}
