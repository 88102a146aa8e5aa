"""The endpoint picker's port: a gRPC server for Envoy's external processing, and gRPC's health service."""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.endpoint_picker.endpoints import Endpoints, endpoint_of
from router.endpoint_picker.ext_proc_pb2 import ProcessingRequest
from router.endpoint_picker.messages import SERVICE
from router.endpoint_picker.pick import Pick
from router.proxy.counters import Counters
from router.proxy.hold_clock import HoldClock
from router.proxy.own_routes import readiness
from router.proxy.prompt_reader import PromptReader
from router.proxy.service import Service
from router.routing.fleet import Fleet

logger = logging.getLogger("warmroute.picker")

Stream = grpc.aio.ServicerContext[ProcessingRequest, bytes]

LIVENESS = ("", "liveness")
READINESS = ("readiness", SERVICE)
"""Services that gRPC's health check may ask for; the names are the Endpoint Picker Protocol's."""
HEALTH_EVERY_S = 0.25
OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_receive_message_length", -1),  # limits.body_bytes is looked at where the client can be told
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 60_000),  # a gateway that is gone without a word
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class EndpointPicker:
    """The request path of one picker (``RequestPath``). Runs in the loop that ``start`` is awaited in."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        counters: Counters,
        *,
        prompt_reader: PromptReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``ConfigError`` where a replica is not named by its IP address."""
        _require_addresses(config)
        self.service = Service(fleet, config, counters, clock)
        self.service.prompt_reader = prompt_reader
        self._listen = config.listen
        self._tls = config.tls
        self._endpoints = Endpoints(fleet)
        self._hold_clock = HoldClock(self.service)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self.address = config.listen

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen on ``config.listen``, with the certificate of ``config.tls`` if there is one.

        ``tls`` is not used: gRPC reads the files itself. Raises ``OSError`` where it cannot listen.
        """
        server = self._server = grpc.aio.server(options=OPTIONS)
        process: grpc.RpcMethodHandler[ProcessingRequest, bytes] = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=ProcessingRequest.FromString
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            if self._tls is None:
                port = server.add_insecure_port(self._listen)
            else:
                port = server.add_secure_port(self._listen, self._credentials())
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not self._listen.startswith("unix:"):
            self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        await server.start()
        await self._tell_health()
        self._watching = asyncio.create_task(self._watch(), name="endpoint picker's health")

    def begin_shutdown(self) -> None:
        """Readiness fails from now on; requests are still taken."""
        self.service.shutting_down = True

    async def stop(self, timeout_s: float) -> None:
        """Take no new streams, let those there finish for ``timeout_s``, then break what is left."""
        self.begin_shutdown()
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await self._tell_health()
        if self._server is not None:
            await self._server.stop(timeout_s)
        self._hold_clock.stop()

    def apply(self, config: RouterConfig) -> None:
        """Use ``config``'s settings for requests that begin from now on; the address stays."""
        self.service.apply(config)
        self._tls = config.tls

    # --- one request ------------------------------------------------------------------------------

    async def _process(self, _: AsyncIterator[ProcessingRequest], context: Stream) -> None:
        """One stream of Envoy's, which is one HTTP request."""
        counters = self.service.counters
        counters.open_client_connections += 1
        changed = asyncio.Event()
        pick = Pick(self.service, self._endpoints, changed.set)
        try:
            await self._converse(pick, context, changed)
        except Exception:
            logger.exception("a fault of the picker's own")
            pick.failed_inside()
            await _send(pick, context)
        finally:
            pick.gone()
            counters.open_client_connections -= 1

    async def _converse(self, pick: Pick, context: Stream, changed: asyncio.Event) -> None:
        reading: asyncio.Future[Any] | None = None
        """A message that is asked for, while the pick may come first."""
        try:
            while not pick.over:
                if pick.undecided:
                    reading = reading or asyncio.ensure_future(context.read())
                    if not await _first(reading, changed):
                        await _send(pick, context)
                        continue
                message = await (reading or context.read())
                reading = None
                if message is grpc.aio.EOF:
                    return
                pick.take(message)
                await _send(pick, context)
        finally:
            if reading is not None:
                reading.cancel()

    # --- health -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._tell_health()
            self.service.forget_departed()
            self._endpoints.forget_departed()

    async def _tell_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        ready = serving if readiness(self.service)[0] == 200 else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in LIVENESS:
            await self._health.set(name, serving)
        for name in READINESS:
            await self._health.set(name, ready)

    # --- TLS --------------------------------------------------------------------------------------

    def _credentials(self) -> grpc.ServerCredentials:
        """The certificate that is in force when a connection is made."""
        return grpc.dynamic_ssl_server_credentials(self._certificate(), self._certificate)

    def _certificate(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        assert tls is not None
        pair = Path(tls.key or tls.cert).read_bytes(), Path(tls.cert).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])


async def _first(reading: "asyncio.Future[Any]", changed: asyncio.Event) -> bool:
    """Wait for the next message or the pick; true if the message is there."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return reading.done()


async def _send(pick: Pick, context: Stream) -> None:
    while pick.out:
        await context.write(pick.out.pop(0))


def _require_addresses(config: RouterConfig) -> None:
    named = [replica.url for replica in config.replicas if endpoint_of(replica.url) is None]
    if named:
        raise ConfigError(
            f"replicas: {', '.join(named)}: expected http://IP:PORT, as a gateway knows its endpoints; "
            "for names use `discovery: - kind: dns`, which finds their addresses"
        )
