"""Reads a request's prompt token by token where the model's tokenizer is configured, as text otherwise.

Used only when ``models:`` is configured; plain text mode never comes here. Rendering and tokenizing a long
prompt takes milliseconds, so anything over ``OFF_LOOP_BYTES`` is done in a thread and ``done`` is called from
the event loop when it is ready. Whatever goes wrong, the request is read as text, and counted by reason:
``template`` ``tokenizer`` ``no_template`` ``parts`` ``tools`` ``reasoning`` ``options`` ``shape`` ``tokens``
``long`` ``busy`` ``fault``.
"""

import asyncio
import importlib.util
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.proxy.chat_request import NotExact
from router.proxy.counters import Counters
from router.proxy.crowded_body import Parser
from router.routing.block_naming import BlockNaming
from router.routing.control_fields import control_fields
from router.routing.flat_request import TokenIds, whole_request
from router.routing.prompt_blocks import UNREADABLE, Prompt, UniformLayout, request_limits, text_prompt

if TYPE_CHECKING:
    from router.proxy.exact_model import ExactModel

log = logging.getLogger("warmroute.exact")

OFF_LOOP_BYTES = 2 * 1024
"""Bodies up to here are read at once: some 450 tokens, one or two milliseconds."""
MOST_BYTES = 1024 * 1024
"""Longer bodies are read as text: some 250,000 tokens take a second, and making the list of them holds up
every thread."""
WORKERS = 2
MOST_WAITING = 64
"""With so many prompts in the threads' queue the next one is read as text: better roughly than late."""

Namings = Callable[[], Sequence[BlockNaming]]


class PromptReader:
    """Owned by the router; ``close`` it at the end."""

    def __init__(self, models: Mapping[str, "ExactModel"], namings: Namings, counters: Counters) -> None:
        """``namings`` tells in which namings a prompt's blocks are wanted: ``ExactIndex.namings``."""
        self._models = models
        self._namings = namings
        self._counters = counters
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenize")
        self._waiting = 0

    def read(
        self,
        body: bytes,
        done: Callable[[Prompt], None],
        parse: Parser = whole_request,
        request: dict[str, Any] | None = None,
    ) -> None:
        """Call ``done`` with the prompt: at once if it is short or text, else later from the running loop.

        Never raises, and calls ``done`` exactly once. ``request``: what ``parse`` made of it, where that
        was read before; with the tenant's salt, which a flat reading of the client's bytes does not see.
        """
        if request is None:
            request = parse(body)
        model = self._model(request)
        if request is not None and model is not None and parse is not whole_request:
            if type(request.get("prompt")) is not TokenIds:
                done(self._as_text(request, "long"))
                return
            request = whole_request(body)
        if request is None or model is None or len(body) <= OFF_LOOP_BYTES:
            done(self._read(request, model))
            return
        if len(body) > MOST_BYTES or self._waiting >= MOST_WAITING:
            done(self._as_text(request, "long" if len(body) > MOST_BYTES else "busy"))
            return
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, _exact, model, request, tuple(self._namings())
        )
        work.add_done_callback(lambda finished: self._finished(request, finished, done))

    def read_now(self, body: bytes) -> Prompt:
        """The prompt, however long it takes: for ``explain``."""
        request = whole_request(body)
        return self._read(request, self._model(request))

    def close(self) -> None:
        """Give the threads back; prompts that wait are read as text."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _model(self, request: dict[str, Any] | None) -> "ExactModel | None":
        name = None if request is None else request.get("model")
        return self._models.get(name) if type(name) is str else None

    def _read(self, request: dict[str, Any] | None, model: "ExactModel | None") -> Prompt:
        if request is None:
            return UNREADABLE
        if model is None:
            return text_prompt(request)
        try:
            prompt = _exact(model, request, self._namings())
        except Exception as error:
            return self._as_text(request, _reason(error))
        self._counters.exact_prompts += 1
        return prompt

    def _finished(
        self,
        request: dict[str, Any],
        finished: "asyncio.Future[Prompt]",
        done: Callable[[Prompt], None],
    ) -> None:
        self._waiting -= 1
        if finished.cancelled():
            done(self._as_text(request, "busy"))
            return
        error = finished.exception()
        if error is not None:
            done(self._as_text(request, _reason(error)))
        else:
            self._counters.exact_prompts += 1
            done(finished.result())

    def _as_text(self, request: dict[str, Any], reason: str) -> Prompt:
        fallbacks = self._counters.text_fallbacks
        fallbacks[reason] = fallbacks.get(reason, 0) + 1
        return text_prompt(request)


def make_prompt_reader(config: RouterConfig, namings: Namings, counters: Counters) -> PromptReader | None:
    """The reader that ``models:`` asks for, or ``None``.

    Raises ``ConfigError`` when a file is wrong or a package is missing.
    """
    if not config.models:
        return None
    missing = [name for name in ("tokenizers", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"models ({', '.join(config.models)}): not installed: {', '.join(missing)}; "
            "run `pip install 'warmroute[exact]'` or remove models"
        )
    from router.proxy.exact_model import load_exact_model

    models = {name: load_exact_model(name, model) for name, model in config.models.items()}
    return PromptReader(models, namings, counters)


def _exact(model: "ExactModel", request: dict[str, Any], namings: Sequence[BlockNaming]) -> Prompt:
    """The prompt token by token. Raises ``NotExact``; other exceptions are faults of ours."""
    tokens = model.tokens(request)
    if not tokens:
        raise NotExact("shape")
    salt = request.get("cache_salt")
    if salt is not None and (type(salt) is not str or not salt):
        raise NotExact("shape")
    try:
        chains = {naming: naming.keys(tokens, salt) for naming in namings}
    except (OverflowError, UnicodeEncodeError, ValueError, struct.error) as error:
        raise NotExact("tokens") from error
    first = namings[0]
    name, max_tokens = request_limits(request)
    return Prompt(
        keys=chains[first],
        units=len(tokens),
        layout=UniformLayout(first.block_tokens),
        model=name,
        stream=request.get("stream") is True,
        max_tokens=max_tokens,
        chains=chains,
        controls=control_fields(request),
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, NotExact):
        return error.reason
    log.error("a prompt could not be read: %r; it is read as text", error, exc_info=error)
    return "fault"
