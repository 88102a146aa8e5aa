"""One OpenTelemetry span per routed request, as a real OTLP/HTTP collector gets it; nothing when off."""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.assembly import Router
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Hang,
    Send,
    chunk,
    delta,
    event,
    sized,
)
from tests.fakes.otlp_receiver import ERROR, SERVER, OtlpReceiver, SeenSpan, otlp_receiver
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 60}}
TOKENS = chunk(delta("hi")) + chunk(event({"choices": [], "usage": USAGE})) + chunk(DONE_EVENT)
STREAM = [Send(STREAM_HEAD + TOKENS + LAST_CHUNK)]
BROKEN = [Send(STREAM_HEAD + chunk(delta("hi"))), Close()]


def traced(
    scenario: Callable[[RouterRig, OtlpReceiver], Awaitable[None]],
    *,
    replicas: int = 1,
    tracing: dict[str, Any] | None = None,
    **config: Any,
) -> OtlpReceiver:
    """Run ``scenario`` in front of a collector that outlives the router."""
    with otlp_receiver() as receiver:

        async def with_receiver(rig: RouterRig) -> None:
            await scenario(rig, receiver)

        keys = {"endpoint": receiver.url} | (tracing or {})
        with_router(with_receiver, replicas=replicas, tracing=keys, **config)
    return receiver


def only(receiver: OtlpReceiver) -> SeenSpan:
    (span,) = receiver.spans
    return span


def test_a_span_has_the_decision_and_is_the_replicas_parent() -> None:
    seen: list[str | None] = []

    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        rig.replica.default = STREAM
        await rig.ask(
            CHAT_STREAM,
            "/v1/chat/completions?x=1",
            traceparent=f"00-{TRACE}-{PARENT}-01",
            TraceState="a=1",
            tracestate="b=2",
            x_request_id="mine",
        )
        request = rig.replica.requests[-1]
        seen.extend(request.field(name) for name in ("traceparent", "tracestate"))
        await until(lambda: bool(receiver.spans))  # not only at the end

    span = only(traced(scenario, tracing={"service_name": "front", "headers": {"x-key": "sk-canary"}}))
    assert (span.name, span.kind) == ("POST /v1/chat/completions", SERVER)
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert seen == [f"00-{TRACE}-{span.span_id}-01", "a=1,b=2"] and span.tracestate == "a=1,b=2"
    assert span.resource["service.name"] == "front" and span.resource["service.instance.id"]
    told = span.attributes
    assert told["http.request.method"] == "POST" and told["url.path"] == "/v1/chat/completions"
    assert told["http.response.status_code"] == 200 and told["gen_ai.request.model"] == "m"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (100, 7)
    assert told["warmroute.request_id"] == "mine" and told["warmroute.replica"] == "r0"
    assert told["warmroute.reason"] == "only" and told["warmroute.tries"] == 1
    assert told["warmroute.matched_tokens"] == 0 and told["warmroute.cached_tokens"] == 60
    assert told["warmroute.prefill_ms"] > 0.0 == told["warmroute.saved_ms"]
    assert 0.0 < told["warmroute.ttft_ms"] <= 1e3 * span.duration_s + 1.0
    assert span.status != ERROR and "error.type" not in told


def test_a_request_without_context_begins_a_trace_and_the_collector_gets_its_key() -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        for context in ({}, {"traceparent": "00-zz"}, {"traceparent": f"00-{TRACE}-{PARENT}-01, 00-b"}):
            await rig.ask(CHAT, tracestate="left=over", **context)
        assert [request.field("tracestate") for request in rig.replica.requests] == [None] * 3

    receiver = traced(scenario, tracing={"headers": {"x-key": "sk-canary"}})
    assert len({span.trace_id for span in receiver.spans}) == 3
    assert TRACE not in {span.trace_id for span in receiver.spans}
    assert {span.parent_id for span in receiver.spans} == {""}
    assert {headers["x-key"] for headers in receiver.headers} == {"sk-canary"}


def test_a_reload_changes_the_collectors_key_and_nothing_else_of_tracing() -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        def keys() -> set[str | None]:
            return {headers["x-key"] for headers in receiver.headers}

        await rig.ask(CHAT)
        await until(lambda: keys() == {"sk-old"})
        kept = {"endpoint": receiver.url, "headers": {"x-key": "sk-new"}}
        await rig.reload(rig.entry(0), tracing=kept)
        await rig.ask(CHAT)
        await until(lambda: keys() == {"sk-old", "sk-new"})
        answer = await rig.try_reload(rig.entry(0), tracing=kept | {"sample": 0.5})
        assert answer.status == 400 and "tracing: cannot be changed" in answer.json()["error"]["message"]

    receiver = traced(scenario, tracing={"headers": {"x-key": "sk-old"}})
    assert len(receiver.spans) == 2


@pytest.mark.parametrize(("flags", "sample", "spans"), [("00", 1.0, 0), ("01", 0.0, 1), (None, 0.0, 0)])
def test_what_is_sampled_is_the_clients_choice_and_else_a_share(
    flags: str | None, sample: float, spans: int
) -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        context = {} if flags is None else {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        await rig.ask(CHAT, **context)
        passed_on = rig.replica.requests[-1].field("traceparent") or ""
        assert int(passed_on[-2:], 16) & 1 == spans
        assert (TRACE in passed_on) == (flags is not None) and PARENT not in passed_on

    assert len(traced(scenario, tracing={"sample": sample}).spans) == spans


def test_failures_show_and_every_request_has_one_span_however_often_it_was_tried() -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        rig.replicas[0].plans.append([Close()])
        await rig.ask(CHAT)
        rig.replicas[0].default = BROKEN
        rig.replicas[1].default = BROKEN
        await rig.ask(CHAT_STREAM)
        rig.replicas[0].default = rig.replicas[1].default = [Send(sized(b"{}", 400))]
        await rig.ask(CHAT)
        await rig.ask({**CHAT, "priority": 1})
        rig.replicas[0].default = rig.replicas[1].default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.router.counters.in_flight == 1)
        client.leave()
        await until(lambda: rig.router.counters.in_flight == 0)
        await rig.get("/health")
        await rig.get("/v1/models")
        await rig.get("/nowhere")  # routed to no replica: no spans of these

    receiver = traced(scenario, replicas=2)
    retried, broken, refused, control, left = receiver.spans
    assert retried.attributes["warmroute.tries"] == 2 and retried.attributes["warmroute.reason"] == "retry"
    assert retried.attributes["warmroute.replica"] == "r1" and retried.status != ERROR
    assert broken.attributes["error.type"] == "replica_broken" and broken.status == ERROR
    assert refused.attributes["http.response.status_code"] == 400 and refused.status != ERROR
    assert control.attributes["http.response.status_code"] == 400
    assert "warmroute.replica" not in control.attributes
    assert left.attributes["http.response.status_code"] == 499 and left.status != ERROR


def test_paths_and_methods_of_clients_do_not_name_spans() -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        for number in range(3):
            await rig.ask(CHAT, f"/v1/made/up/{number}")
        await rig.ask(b"", "/v1/x", method="PURGE")

    names = {span.name for span in traced(scenario).spans}
    assert names == {"POST /v1/*", "_OTHER /v1/*"}


def test_a_collector_that_fails_costs_one_line_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: RouterRig, receiver: OtlpReceiver) -> None:
        receiver.answer = 400
        await rig.ask(CHAT)
        await until(lambda: rig.router.counters.spans_lost == 1)
        await rig.ask(CHAT)
        await until(lambda: rig.router.counters.spans_lost == 2)
        receiver.answer = 200
        await rig.ask(CHAT)
        await until(lambda: rig.router.counters.spans_sent == 1)
        page = (await rig.admin("/metrics")).body.decode()
        assert (
            "warmroute_trace_spans_lost_total 2.0" in page and "warmroute_trace_spans_sent_total 1.0" in page
        )

    with caplog.at_level(logging.INFO):
        traced(scenario)
    lines = [record.getMessage() for record in caplog.records if "traces are" in record.getMessage()]
    lines += [record.getMessage() for record in caplog.records if "traces cannot" in record.getMessage()]
    assert len(lines) == 2
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_nobody_waits_for_a_collector_that_is_not_there() -> None:
    async def scenario(rig: RouterRig) -> None:
        for _ in range(5):
            assert (await rig.ask(CHAT)).status == 200

    with_router(scenario, tracing={"endpoint": "http://127.0.0.1:9/v1/traces"})


def test_off_nothing_is_touched_and_nothing_is_imported() -> None:
    context = ["TraceParent: 00-zz", "traceparent:  00-a-b-01", "tracestate: a=1", "tracestate: b=2"]

    async def scenario(rig: RouterRig) -> None:
        client = await rig.client()
        head = "\r\n".join(["POST /v1/x HTTP/1.1", "Host: a", *context, "Content-Length: 2", "", "{}"])
        await client.send(head.encode())
        assert (await client.answer()).status == 200
        raw = rig.replica.requests[-1].raw_head.decode()
        assert "\r\n".join(context) in raw

    with_router(scenario)


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = {"replicas": [{"url": "http://10.0.0.1:8000"}]}
    for keys, says in (
        ({}, "tracing.endpoint: Field required"),
        ({"endpoint": "collector:4318"}, "expected http://HOST:PORT/v1/traces"),
        ({"endpoint": "http://collector:4318"}, "with the path"),
        ({"endpoint": "http://a:b@collector/v1/traces"}, "belong in headers"),
        ({"endpoint": "http://c/v1/traces", "sample": 1.5}, "tracing.sample"),
        ({"endpoint": "http://c/v1/traces", "headers": {"a": "two words"}}, "tracing.headers.a"),
    ):
        with pytest.raises(ConfigError) as told:
            parse_config(replicas | {"tracing": keys}, "router.yaml")
        assert says in str(told.value) and "words" not in str(told.value)
    config = parse_config(replicas | {"tracing": {"endpoint": "http://c/v1/traces"}}, "router.yaml")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry") else found(name)
    )
    with pytest.raises(ConfigError, match=r"pip install 'warmroute\[otel\]'"):
        Router(config)


def test_the_package_is_imported_only_where_it_is_asked_for() -> None:
    program = (
        "import sys; from router.config import parse_config; from router.proxy.assembly import Router;"
        "Router(parse_config({'replicas': [{'url': 'http://10.0.0.1'}]}, 'x'));"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
