"""Prompts token by token, as the engine sees them: the router's exact mode over a log's request bodies."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from router.config import ModelConfig
from router.config_errors import ConfigError
from sim.diagnose.request_log import LoggedRequest
from sim.workload.trace import TraceError


def with_token_ids(rows: Sequence[LoggedRequest], model: ModelConfig) -> list[LoggedRequest]:
    """``rows`` with the token ids of their bodies, where the log has none.

    Raises ``TraceError`` for a row that cannot be rendered, a file that is wrong, a package that is missing.
    """
    missing = [name for name in ("tokenizers", "jinja2") if find_spec(name) is None]
    if missing:
        raise TraceError(
            f"--tokenizer: not installed: {', '.join(missing)}; run `pip install 'warmroute[exact]'`"
        )
    from router.proxy.chat_request import NotExact
    from router.proxy.exact_model import load_exact_model

    try:
        exact = load_exact_model("diagnose", model)
    except ConfigError as error:
        raise TraceError(f"--tokenizer: {error}") from error
    made = []
    for row in rows:
        if row.token_ids is None and row.body is not None:
            try:
                row = replace(row, token_ids=tuple(exact.tokens(row.body)))
            except NotExact as error:
                raise TraceError(
                    f"line {row.line}: the prompt cannot be rendered exactly ({error.reason}); leave "
                    "--tokenizer away to look at its text"
                ) from error
        made.append(row)
    return made
