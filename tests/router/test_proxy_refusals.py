"""What the router answers itself: its own routes, errors, what they tell and what no log tells."""

import json
from typing import Any

import pytest

from tests.fakes.fake_replica import Send, sized
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("POST", "/v1", 404, "not_found"),
        ("POST", "/v2/chat/completions", 404, "not_found"),
        ("GET", "//v1/x", 404, "not_found"),
        ("POST", "/drain/r0", 404, "not_found"),
        ("GET", "/v1/../metrics", 404, "not_found"),
        ("GET", "/v1/%2e%2e/metrics", 404, "not_found"),
        ("GET", "/v1/.%2E/metrics", 404, "not_found"),
        ("GET", "/v1/x/..%2f..%2fmetrics", 404, "not_found"),
        ("GET", "/v1/..\\metrics", 404, "not_found"),
        ("GET", "/v1/./x", 404, "not_found"),
        ("OPTIONS", "*", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/readiness", 405, "method_not_allowed"),
    ],
)
def test_B013_routes_that_are_not_there(method: str, path: str, status: int, code: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for _ in range(2):  # the connection stays open
            await client.post(b"", path, method=method)
            answer = await client.answer()
            assert answer.status == status
            assert answer.error["code"] == code
            assert (answer.field("allow") == "GET, HEAD") == (status == 405)
        assert not rig.replica.requests

    with_rig(scenario)


def test_idle_connections_are_closed_without_a_word() -> None:
    async def scenario(rig: Rig) -> None:
        fresh, used = await rig.client(), await rig.client()
        await used.post(CHAT)
        assert (await used.answer()).status == 200
        assert await fresh.closed()
        assert await used.closed()

    with_rig(scenario, timeouts={"client_keepalive_s": 0.1})


def test_one_connection_too_many() -> None:
    async def scenario(rig: Rig) -> None:
        clients = [await rig.client() for _ in range(3)]
        await until(lambda: rig.counters.open_client_connections == 3)
        answer = await (await rig.client()).answer()
        assert answer.status == 503
        assert answer.error["code"] == "too_many_connections"
        assert answer.field("retry-after") == "1"
        clients[0].leave()
        await until(lambda: rig.counters.open_client_connections <= 3)
        await clients[1].post(CHAT)
        assert (await clients[1].answer()).status == 200

    with_rig(scenario, limits={"client_connections": 3})


def test_health_readiness_and_models() -> None:
    async def scenario(rig: Rig) -> None:
        for path in ("/health", "/health?x=1", "/readiness", "/v1/models"):
            answer = await rig.ask(b"", path, method="GET")
            assert answer.status == 200
            to_head = await rig.ask(b"", path, method="HEAD")
            assert to_head.fields[:2] == answer.fields[:2]
            assert to_head.body == b""
        rig.fleet.models_reported(0, frozenset({"b", "a"}))
        rig.fleet.models_reported(1, frozenset({"b", "c/d"}))
        answer = await rig.ask(b"", "/v1/models", method="GET")
        assert [model["id"] for model in answer.json()["data"]] == ["a", "b", "c/d"]
        assert {model["object"] for model in answer.json()["data"]} == {"model"}
        rig.fleet.probe_failed(1, 2.0, refused=True)
        answer = await rig.ask(b"", "/v1/models", method="GET")
        assert [model["id"] for model in answer.json()["data"]] == ["a", "b"]
        rig.fleet.probe_failed(0, 2.0, refused=True)
        for path in ("/readiness", "/v1/models"):
            assert (await rig.ask(b"", path, method="GET")).status == 503
        assert (await rig.ask(b"", "/health", method="GET")).status == 200
        assert not any(replica.requests for replica in rig.replicas)

    with_rig(scenario, replicas=2, model="m")


def test_readiness_router_stays_when_no_replica_is_left_and_goes_when_it_stops() -> None:
    """Else a fleet that is down takes all its routers out of their service, and clients get no answer."""

    async def scenario(rig: Rig) -> None:
        async def ready() -> tuple[int, str | None]:
            answer = await rig.ask(b"", "/readiness", method="GET")
            return answer.status, answer.json().get("reason")

        rig.fleet.probe_failed(0, 1.0, refused=True)
        status, reason = await ready()  # no replica was usable yet when it was asked
        assert (status, reason) == (503, "no usable replica")
        rig.fleet.probe_succeeded(0, 10.0)
        assert await ready() == (200, None)
        rig.fleet.probe_failed(0, 11.0, refused=True)
        status, reason = await ready()
        assert status == 200 and reason is not None and reason.startswith("no usable replica")
        rig.plane.begin_shutdown()
        assert await ready() == (503, "stopping")

    with_rig(scenario, replicas=1, readiness="router")


def test_B138_errors_have_the_openai_shape() -> None:
    """Every error of the router's that a request can meet; ``RawAnswer.error`` checks the shape."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.ask({**CHAT, "model": "x"})).error["code"] == "model_not_found"
        assert (await rig.ask(CHAT, "/nowhere")).error["type"] == "invalid_request_error"
        rig.drain(0)
        assert (await rig.ask(CHAT)).error["type"] == "server_error"
        rig.drain(0, on=False)
        await rig.replica.kill()
        assert (await rig.ask(CHAT)).error["code"] == "replica_unreachable"
        assert rig.counters.errors == {
            "model_not_found": 1,
            "not_found": 1,
            "no_replica": 1,
            "replica_unreachable": 1,
        }

    with_rig(scenario, model="m")


@pytest.mark.parametrize("exposed", [False, True])
def test_B140_replicas_are_named_only_if_the_operator_wants_it(exposed: bool) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        message = (await rig.ask(CHAT)).error["message"]
        assert ("r0" in message) == exposed
        assert "Errno" not in message
        assert "Error" not in message

    with_rig(scenario, expose_replica_urls=exposed)


CANARIES = ("sk-canary-key", "canary-prompt", "canary-cookie", "canary-query")


def test_B048_no_secret_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        fields: dict[str, Any] = {"Authorization": f"Bearer {CANARIES[0]}", "Cookie": CANARIES[2]}
        body = {"model": "m", "messages": [{"role": "user", "content": CANARIES[1]}]}
        path = f"/v1/chat/completions?key={CANARIES[3]}"
        for plan in (
            [Send(b"garbage\r\n\r\n")],
            [Send(sized(b"{}", 500, "No"))],
            [Send(b"HTTP/1.1 200 OK\r\n")],
        ):
            rig.replica.plans.append(plan)
            client = await rig.client()
            await client.post(body, path, **fields)
            if plan[0].data.startswith(b"HTTP/1.1 200"):
                client.leave()
            else:
                await client.answer()
        await rig.replica.kill()
        await rig.ask(body, path, **fields)
        client = await rig.client()
        await client.send(f"POST /v1/x HTTP/1.1\r\nBad Header {CANARIES[0]}\r\n\r\n".encode())
        await client.answer()

    caplog.set_level("DEBUG")
    with_rig(scenario)
    assert caplog.records
    for canary in (*CANARIES, "secret-of-ours"):
        assert canary not in caplog.text


def test_bad_request_ids_do_not_break_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        answer = await rig.ask(CHAT, x_request_id="a\tb\xe9" + "c" * 200)
        assert json.loads(answer.body)["error"]["code"] == "replica_unreachable"

    with_rig(scenario)
    lines = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert len(lines[0]) < 300


ENGINE_STEERING = (
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-prefiller-host-port",
    "x-llm-d-data-parallel-host-port",
    "x-llm-d-encoder-hosts-ports",
    "x-llm-d-kv-cache-source-host-port",
    "x-llm-d-prefiller-host-port",
    "x-override-bootstrap-host",
    "x-override-bootstrap-port",
    "x-override-bootstrap-room",
    "x-override-conversation-id",
    "x-override-disagg-prefill-dp-rank",
    "x-override-priority",
    "x-override-rid",
    "x-override-routed-dp-rank",
    "x-vllm-priority",
    "endpoint-load-metrics-format",
)
"""vLLM's rank, priority and report of its load, what SGLang puts in the place of a body's fields, and where
the sidecar of llm-d has parts of a request computed: the prompt would go there."""


def test_B013_B066_no_header_of_a_client_chooses_rank_or_host() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, **dict.fromkeys(ENGINE_STEERING, "169.254.169.254:80"), x_kept="a")
        assert answer.status == 200
        (seen,) = rig.replica.requests
        assert seen.field("x-kept") == "a"
        assert not {name for name, _ in seen.fields} & {name.encode() for name in ENGINE_STEERING}

    with_rig(scenario)


def test_B066_a_body_that_an_engine_would_unpack_is_refused() -> None:
    """SGLang's ``x-body-compressed``: a field that steers it could hide in there, or a salt."""

    async def scenario(rig: Rig) -> None:
        for body in (b"\x28\xb5\x2f\xfd\x00", json.dumps(CHAT).encode()):
            answer = await rig.ask(body, X_Body_Compressed="zstd")
            assert (answer.status, answer.error["code"]) == (415, "body_compressed")
        assert not rig.replica.requests

    with_rig(scenario)
