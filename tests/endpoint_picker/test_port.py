"""The picker's port as gRPC clients see it: health, TLS, failures to start, stops in good order."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config import parse_config
from router.config_errors import ConfigError
from router.endpoint_picker.endpoint_picker import EndpointPicker
from router.endpoint_picker.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from router.endpoint_picker.messages import SERVICE
from router.proxy.assembly import Router
from tests.endpoint_picker.talk import add
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.proxy_rig import until
from tests.fakes.router_process import router_process
from tests.fakes.router_rig import RouterRig, with_router

TLS = Path(__file__).parents[1] / "fakes" / "tls"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str, service: str, **channel: Any) -> int:
    """What gRPC's health check says of ``service``."""
    async with channel_to(address, **channel) as one:
        answer = await health_pb2_grpc.HealthStub(one).Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


def channel_to(address: str, ca: str | None = None) -> grpc.aio.Channel:
    """To a picker; ``ca``: over TLS."""
    if ca is None:
        return grpc.aio.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials((TLS / ca).read_bytes())
    return grpc.aio.secure_channel(address, credentials)


def stream(channel: grpc.aio.Channel) -> Any:
    """A stream to the picker, as Envoy opens one per request."""
    return channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )()


async def ended(call: Any) -> None:
    """The picker ends the stream, and well."""
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


def head() -> ProcessingRequest:
    """A request that has no body."""
    message = ProcessingRequest()
    message.request_headers.end_of_stream = True
    add(message.request_headers, {":method": "GET", ":path": "/v1/models/m"})
    return message


def test_health_follows_the_fleet() -> None:
    async def scenario(rig: RouterRig) -> None:
        address = rig.router.data_plane.address
        for service in ("", "liveness", "readiness", SERVICE):
            assert await health(address, service) == SERVING
        await rig.replica.kill()
        await rig.until_health("r0", "ejected")
        for service in ("readiness", SERVICE):
            await _until_health(address, service, NOT_SERVING)
        assert await health(address, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health(address, "nobody")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        await rig.replica.start()
        await _until_health(address, SERVICE, SERVING)
        rig.router.data_plane.begin_shutdown()
        await _until_health(address, SERVICE, NOT_SERVING)

    with_router(scenario, make_path=EndpointPicker)


async def _until_health(address: str, service: str, wanted: int) -> None:
    async with asyncio.timeout(10.0):
        while await health(address, service) != wanted:  # noqa: ASYNC110 - only the picker knows
            await asyncio.sleep(0.01)


def test_a_stop_waits_for_requests_under_way() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with channel_to(rig.router.data_plane.address) as channel:
            call = stream(channel)
            await call.write(head())
            assert (await call.read()).HasField("dynamic_metadata")
            stopping = asyncio.create_task(rig.router.data_plane.stop(10.0))
            with pytest.raises(ConnectionRefusedError):
                await _refused_once(rig.router.data_plane.address)
            answer = ProcessingRequest()
            answer.response_headers.end_of_stream = True
            add(answer.response_headers, {":status": "200"})
            await call.write(answer)
            assert (await call.read()).WhichOneof("response") == "response_headers"
            await ended(call)
            await asyncio.wait_for(stopping, 5.0)
        assert rig.router.counters.requests["r0", 200] == 1

    with_router(scenario, make_path=EndpointPicker)


async def _refused_once(address: str) -> None:
    """Connect until that is refused."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(5.0):
        while True:
            with suppress(ConnectionResetError):  # it waited to be accepted when the door closed
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                await writer.wait_closed()


def test_a_broken_client_leaves_nothing_behind() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with channel_to(rig.router.data_plane.address) as channel:
            cancelled, closed = stream(channel), stream(channel)
            for call in (cancelled, closed):
                await call.write(head())
                await call.read()
            cancelled.cancel()
            await until(lambda: rig.router.counters.in_flight == 1)
            await closed.done_writing()
            await ended(closed)
            await until(rig.at_rest)
        assert rig.router.counters.requests == {("r0", 499): 2}

    with_router(scenario, make_path=EndpointPicker)


def test_tls_and_a_certificate_that_is_replaced() -> None:
    async def scenario(rig: RouterRig) -> None:
        address = f"localhost:{rig.router.data_plane.address.rpartition(':')[2]}"
        assert await health(address, "liveness", ca="cert.pem") == SERVING
        rsa = {"cert": str(TLS / "rsa_cert.pem"), "key": str(TLS / "rsa_key.pem")}
        await rig.reload(rig.entry(0), tls=rsa)
        assert await health(address, "liveness", ca="rsa_cert.pem") == SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await health(address, "liveness", ca="cert.pem")

    tls = {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem")}
    with_router(scenario, make_path=EndpointPicker, tls=tls)


def test_a_port_that_is_taken_is_said_at_the_start() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            config = {"listen": listen, "admin": "127.0.0.1:0", "replicas": [{"url": "http://127.0.0.1:9"}]}
            router = Router(parse_config(config, "test"), make_path=EndpointPicker)
            with pytest.raises(OSError, match=listen):
                await router.start()
            await router.stop()

    asyncio.run(main())


def test_replicas_with_names_are_refused_at_the_start() -> None:
    urls = [{"url": "http://10.0.0.1:1"}, {"url": "http://vllm-0:8000"}]
    config = parse_config({"replicas": urls}, "test")
    with pytest.raises(
        ConfigError, match=r"replicas: http://vllm-0:8000: expected http://IP:PORT.*kind: dns"
    ):
        Router(config, make_path=EndpointPicker)


def test_the_command(tmp_path: Path) -> None:
    async def main() -> None:
        replica = FakeReplica()
        await replica.start()
        try:
            async with router_process(tmp_path, [replica], command="endpoint-picker") as picker:
                assert await health(picker.address, "readiness") == SERVING
                picker.process.terminate()
                assert await picker.exit_code() == 0
        finally:
            await replica.stop()

    asyncio.run(main())
