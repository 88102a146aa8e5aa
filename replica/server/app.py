"""A replica from its config: load the model, start the engine's thread, listen; and stop in order."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from aiohttp import web

from replica.config import ConfigError, ReplicaConfig
from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.model.load import LoadedModel, load_model
from replica.model.paged_kv import bytes_per_token
from replica.model.shape import ModelError
from replica.peers.source_rule import SourceRule
from replica.server.engine_thread import EngineThread
from replica.server.kv_event_publisher import KvEventPublisher
from replica.server.metrics import ReplicaMetrics
from replica.server.peer_server import PeerServer
from replica.server.prompts import PromptReader
from replica.server.routes import ReplicaRoutes
from replica.server.wire import echo_request_id, errors_in_openai_shape

log = logging.getLogger("warmroute.replica")

SHOW_FAILURE_S = 5.0
"""A replica whose engine died answers /health with 503 for this long before its process ends."""


class ListenError(OSError):
    """The address cannot be listened on."""


@dataclass(slots=True)
class Running:
    """A replica that answers; ``await stop()`` ends it."""

    url: str
    host: str
    port: int
    engine: EngineThread
    events: KvEventPublisher | None
    """Where cache events are told, if anywhere."""
    peers: PeerServer | None
    """Where other replicas get KV, if anywhere."""
    _routes: ReplicaRoutes
    _runner: web.AppRunner
    _hang_s: float

    async def stop(self) -> bool:
        """Refuse new connections, let running requests finish for ``drain_s``, stop the engine.

        False: the engine hangs in a step, and was left there.
        """
        self._routes.draining = True
        await self._runner.cleanup()
        if self.peers is not None:
            await self.peers.stop()
        ended = await self.engine.stop(self._hang_s)
        if self.events is not None:
            await self.events.close()
        if ended:
            log.info("stopped %s", self.url)
        else:
            log.error(
                "stopped %s, whose engine hangs: one step takes longer than %g s", self.url, self._hang_s
            )
        return ended


async def start(
    config: ReplicaConfig, *, make_engine: Callable[[LoadedModel, EngineLimits, int], Engine] = Engine
) -> Running:
    """Load the model and serve it; returns when requests are answered.

    ``make_engine`` may be replaced in tests.

    Raises:
        ConfigError: the model cannot be loaded, the limits do not fit it, or the disk tier has no folder.
        ListenError: an address is in use or not ours.
    """
    # In a thread that ends: OpenMP counts the helpers of one that lives on, and spins less for all.
    with ThreadPoolExecutor(1, "load") as loader:
        model, engine = await asyncio.get_running_loop().run_in_executor(loader, _load, config, make_engine)
    name = config.served_model_name or model.name
    try:
        events = KvEventPublisher(config.kv_events) if config.kv_events is not None else None
    except OSError as error:
        engine.close()
        raise ListenError(error.strerror) from error
    thread = EngineThread(engine, config.threads, events.publish if events is not None else None)
    limits = engine.limits
    peer_limits = limits.tiers.peers if limits.tiers is not None else None
    sources = peers = None
    if peer_limits is not None:
        sources = SourceRule(peer_limits.allow, peer_limits.signing_key, block_tokens=limits.block_size)
        if peer_limits.listen is not None:
            peers = PeerServer(thread, peer_limits, longest_prompt=limits.max_model_len)
    metrics = ReplicaMetrics(
        name,
        thread,
        limits,
        sources.counters if sources is not None else None,
        peers.counters if peers is not None else None,
        cache_salts=config.cache_salt.accept,
    )
    prompts = PromptReader(
        model.tokenizer, model.chat_template, model.shape.vocab, engine.limits.max_model_len
    )
    routes = ReplicaRoutes(
        model, name, thread, prompts, metrics, sources, config.cache_salt.rule(), config.hang_s
    )
    app = web.Application(middlewares=[errors_in_openai_shape], client_max_size=config.max_body_mib * 2**20)
    app.on_response_prepare.append(echo_request_id)
    routes.add_to(app)
    # To aiohttp 0 seconds means without limit.
    drain_s = max(float(config.drain_s), 0.001)
    # aiohttp waits its time-out twice: for requests to end by themselves, then for connections to close.
    runner = web.AppRunner(
        app, auto_decompress=False, access_log=None, handler_cancellation=True, shutdown_timeout=drain_s / 2
    )
    await runner.setup()
    host, port = config.address
    site = web.TCPSite(runner, host, port)
    thread.start()
    listening = config.listen
    try:
        await site.start()
        if peers is not None and peer_limits is not None:
            listening = f"{peer_limits.listen} (tiers.peers)"
            await peers.start()
    except OSError as error:
        await runner.cleanup()
        await thread.stop()
        if events is not None:
            await events.close()
        raise ListenError(f"listen {listening}: {error.strerror or error}") from error
    bound = runner.addresses[0][1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
    log.info(
        "serving %s at %s: %d KV blocks of %d tokens, context %d, %s",
        name,
        url,
        limits.kv_blocks,
        limits.block_size,
        limits.max_model_len,
        config.dtype,
    )
    if events is not None:
        log.info("KV events at %s, replay at %s", events.endpoint, events.replay_endpoint or "no endpoint")
    if peers is not None:
        log.info("KV for peers at %s", peers.address)
    return Running(url, host, bound, thread, events, peers, routes, runner, config.hang_s)


def run(config: ReplicaConfig) -> int:
    """Serve until SIGTERM or SIGINT; 0 when stopped, 1 when the engine died, hung or could not start, 2 for
    a config that is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Connections that clients break off are no news.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    try:
        return asyncio.run(_serve(config))
    except ConfigError as error:
        print(f"warmroute replica: {error}", file=sys.stderr)
        return 2
    except ListenError as error:
        print(f"warmroute replica: {error}", file=sys.stderr)
        return 1


async def _serve(config: ReplicaConfig) -> int:
    running = await start(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.create_task(event.wait()) for event in (stop, running.engine.died)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if running.engine.failure is not None:
        log.error("%s", running.engine.failure)
        code = 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), SHOW_FAILURE_S)
    for wait in waits:
        wait.cancel()
    return code if await running.stop() else 1


def _load(
    config: ReplicaConfig, make_engine: Callable[[LoadedModel, EngineLimits, int], Engine]
) -> tuple[LoadedModel, Engine]:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        model = load_model(config.model, config.dtype, config.seed, config.weights)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    kv_int8 = config.kv_dtype == "int8"
    blocks = config.kv_blocks(bytes_per_token(model.shape, model.weights.embedding.dtype, int8=kv_int8))
    # The last token of a reply needs no room: nothing attends to it.
    room = blocks * config.block_size + 1
    wanted = config.max_model_len
    if wanted is not None and wanted > min(room, model.shape.context):
        raise ConfigError(
            f"max_model_len {wanted} is more than the model's context of {model.shape.context} tokens or the "
            f"KV cache's {room - 1}; lower it, or raise kv_tokens"
        )
    limits = EngineLimits(
        kv_blocks=blocks,
        block_size=config.block_size,
        kv_int8=kv_int8,
        state_slots=config.state_slots,
        max_running=config.max_running,
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=wanted or min(room, model.shape.context),
        prefix_caching=config.prefix_caching,
        cache=config.cache.settings(),
        tiers=config.tiers.limits() if config.tiers is not None else None,
        pinned_tokens=config.cache.pinned_tokens,
        max_chunk_tokens=config.max_chunk_tokens,
        longest_prefix_first=config.longest_prefix_first,
        max_overtaken=config.max_overtaken,
        shares_prefills=config.shares_prefills,
        record_events=config.kv_events is not None,
        batch_invariant=config.batch_invariant,
    )
    try:
        return model, make_engine(model, limits, config.seed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tiers: {error}") from error
