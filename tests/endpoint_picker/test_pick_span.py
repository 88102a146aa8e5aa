"""One OpenTelemetry span per picked request, as a real OTLP/HTTP collector gets it."""

import asyncio
import json
from typing import Any

import pytest

from router.endpoint_picker.endpoint_picker import EndpointPicker
from router.endpoint_picker.ext_proc_pb2 import ProcessingRequest
from tests.endpoint_picker.talk import add
from tests.endpoint_picker.test_port import channel_to, ended, stream
from tests.fakes.envoy import PickerRig, needs_envoy, with_envoy
from tests.fakes.fake_replica import Hang, Send, sized
from tests.fakes.otlp_receiver import ERROR, SERVER, OtlpReceiver, SeenSpan, otlp_receiver
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}


def by_id(receiver: OtlpReceiver) -> dict[str, SeenSpan]:
    found = {str(span.attributes["warmroute.request_id"]): span for span in receiver.spans}
    assert len(found) == len(receiver.spans), "more than one span for a request"
    return found


@needs_envoy
def test_behind_envoy_a_span_has_the_decision_and_is_the_replicas_parent() -> None:
    async def scenario(rig: PickerRig) -> None:
        answer = await rig.ask(CHAT_STREAM, "/v1/chat/completions?x=1", x_request_id="whole", **CONTEXT)
        assert answer.status == 200
        await rig.ask(x_request_id="begins", tracestate="left=over")
        rig.replicas[0].default = [Send(sized(b"{}", 503, "Service Unavailable"))]
        assert (await rig.ask(x_request_id="elsewhere")).status == 200
        assert (await rig.ask({**CHAT, "model": "other"}, x_request_id="refused")).status == 404
        rig.replicas[0].default = rig.replicas[1].default = [Hang()]
        seen_before = sum(rig.seen())
        client = await rig.client()
        await client.post(CHAT, x_request_id="left")
        await until(lambda: sum(rig.seen()) > seen_before)
        client.leave()
        await until(lambda: not rig.counters.in_flight)
        await until(lambda: len(receiver.spans) == 5)
        sent = [one for replica in rig.replicas for one in replica.requests]
        seen.update({str(one.field("x-request-id")): one for one in sent})

    seen: dict[str, Any] = {}
    with otlp_receiver() as receiver:
        tracing = {"endpoint": receiver.url, "service_name": "picker"}
        with_envoy(scenario, tracing=tracing, expose_routing=False)
    spans = by_id(receiver)
    whole = spans["whole"]
    assert (whole.name, whole.kind, whole.status) == ("POST /v1/chat/completions", SERVER, 0)
    assert (whole.trace_id, whole.parent_id, whole.tracestate) == (TRACE, PARENT, "a=1")
    assert seen["whole"].field("traceparent") == f"00-{TRACE}-{whole.span_id}-01"
    assert seen["whole"].field("tracestate") == "a=1" and whole.resource["service.name"] == "picker"
    told = whole.attributes
    assert told["url.path"] == "/v1/chat/completions" and told["gen_ai.request.model"] == "m"
    assert told["http.response.status_code"] == 200 and told["warmroute.replica"] == "r0"
    assert told["warmroute.tries"] == 1 and told["warmroute.ttft_ms"] > 0.0 == told["warmroute.saved_ms"]
    assert told["warmroute.reason"] and told["warmroute.prefill_ms"] > 0.0 <= told["warmroute.held_ms"]
    assert told["gen_ai.usage.input_tokens"] > 0 < told["gen_ai.usage.output_tokens"]
    begins = spans["begins"]
    assert begins.parent_id == "" and begins.trace_id != TRACE
    assert seen["begins"].field("traceparent").startswith(f"00-{begins.trace_id}-{begins.span_id}-")
    assert seen["begins"].field("tracestate") is None, "it belongs to a context that there is not"
    elsewhere = spans["elsewhere"].attributes
    assert (elsewhere["warmroute.replica"], elsewhere["warmroute.tries"]) == ("r1", 2)
    refused, left = spans["refused"], spans["left"]
    assert (refused.attributes["error.type"], refused.status) == ("model_not_found", ERROR)
    assert refused.attributes["http.response.status_code"] == 404
    assert "warmroute.replica" not in refused.attributes
    assert (left.attributes["http.response.status_code"], left.status) == (499, 0)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_pick_names_the_span_in_the_place_of_the_clients_context(sampled: bool) -> None:
    async def scenario(rig: RouterRig) -> None:
        async with channel_to(rig.router.data_plane.address) as channel:
            call = stream(channel)
            head, body, answer = (ProcessingRequest() for _ in range(3))
            context = {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}"}
            add(head.request_headers, {":method": "POST", ":path": "/v1/chat/completions", **context})
            await call.write(head)
            body.request_body.body, body.request_body.end_of_stream = json.dumps(CHAT).encode(), True
            await call.write(body)
            mutation = (await call.read()).request_headers.response.header_mutation
            fields = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
            parents.append(fields["traceparent"])
            assert "tracestate" in mutation.remove_headers and "traceparent" not in mutation.remove_headers
            answer.response_headers.end_of_stream = True
            add(answer.response_headers, {":status": "500"})
            await call.write(answer)
            await call.read()  # the body's reply
            await call.read()
            await ended(call)

    parents: list[str] = []
    with otlp_receiver() as receiver:
        with_router(scenario, make_path=EndpointPicker, tracing={"endpoint": receiver.url})
    (parent,) = parents
    assert parent.startswith(f"00-{TRACE}-") and PARENT not in parent and parent[-1] == str(int(sampled))
    assert [span.span_id in parent and span.status for span in receiver.spans] == [ERROR] * sampled


def test_refused_before_it_was_whole_a_request_has_no_span() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with channel_to(rig.router.data_plane.address) as channel:
            call = stream(channel)
            head = ProcessingRequest()
            add(head.request_headers, {":method": "POST", ":path": "/v1/chat/completions"})
            await call.write(head)
            refusal = await asyncio.wait_for(call.read(), 5.0)
            assert refusal.immediate_response.status.code == 401
            await ended(call)

    with otlp_receiver() as receiver:
        keys = {"public": ["sk-right"]}
        with_router(scenario, make_path=EndpointPicker, tracing={"endpoint": receiver.url}, keys=keys)
    assert receiver.spans == []
