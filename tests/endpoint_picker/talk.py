"""A gateway's side of the talk with a picker of three replicas, message by message."""

import json
from typing import Any

from router.config import parse_config
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from router.endpoint_picker.pick import Pick
from router.proxy.counters import Counters
from router.proxy.fleet_config import make_fleet
from router.proxy.request_head import STEERING_HEADERS
from router.proxy.service import Service
from router.routing.replica_state import UNNAMED
from tests.fakes.proxy_rig import CHAT_STREAM

DESTINATION = "x-gateway-destination-endpoint"
ENDPOINTS = ["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::3]:8000"]
BODY = json.dumps(CHAT_STREAM).encode()


class Talk:
    """One request with a picker of three replicas."""

    def __init__(self, **config: Any) -> None:
        urls = [{"url": f"http://{endpoint}"} for endpoint in ENDPOINTS]
        made = parse_config({"replicas": urls, "policy": {"kind": "round_robin"}, "seed": 1} | config, "test")
        self.fleet = make_fleet(made)
        for replica in self.fleet.replicas:
            self.fleet.probe_succeeded(replica.index, 0.0)
            self.fleet.engine_found(replica.index, replica.engine or UNNAMED)
        self.counters = Counters()
        self.service = Service(self.fleet, made, self.counters, lambda: 1.0)
        self.endpoints = Endpoints(self.fleet)
        self.decisions = 0
        self.begin()

    def begin(self) -> None:
        """The next request."""
        self.pick = Pick(self.service, self.endpoints, self._decided)

    def _decided(self) -> None:
        self.decisions += 1

    def say(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """A message; the replies to it."""
        self.pick.take(ProcessingRequest.FromString(message.SerializeToString()))
        out = [ProcessingResponse.FromString(one) for one in self.pick.out]
        self.pick.out.clear()
        return out

    def head(
        self, mode: int | None = FULL_DUPLEX_STREAMED, *, last: bool = False, **fields: str
    ) -> list[ProcessingResponse]:
        """The request's head; without a ``mode`` the gateway does not say how it sends bodies."""
        message = ProcessingRequest()
        message.request_headers.end_of_stream = last
        add(message.request_headers, {":method": "POST", ":path": "/v1/chat/completions", **fields})
        if mode is not None:
            message.protocol_config.request_body_mode = mode  # type: ignore[assignment]
            message.protocol_config.response_body_mode = mode  # type: ignore[assignment]
        return self.say(message)

    def body(self, body: bytes = BODY, *, last: bool = True) -> list[ProcessingResponse]:
        """A piece of the request's body."""
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = body, last
        return self.say(message)

    def answer(
        self, status: int = 200, *, served: str | None = None, last: bool = True, **fields: str
    ) -> Any:
        """The answer's head."""
        message = ProcessingRequest()
        message.response_headers.end_of_stream = last
        add(message.response_headers, {":status": str(status), **fields})
        if served is not None:
            metadata = message.metadata_context.filter_metadata["envoy.lb"]
            metadata.update({"x-gateway-destination-endpoint-served": served})
        return self.say(message)

    def answer_body(self, body: bytes, *, last: bool) -> list[ProcessingResponse]:
        """A piece of the answer's body."""
        message = ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = body, last
        return self.say(message)

    def at_rest(self) -> bool:
        """Nothing is booked."""
        ledgers = [replica.ledger for replica in self.fleet.replicas]
        return not self.counters.in_flight and not any(one.in_flight for one in ledgers)


def add(headers: Any, fields: dict[str, str]) -> None:
    """Set header fields as Envoy does: values as bytes."""
    for name, value in fields.items():
        headers.headers.headers.add(key=name, raw_value=value.encode())


def picked(reply: ProcessingResponse) -> list[str]:
    """The endpoints that ``reply`` names; header and metadata must agree."""
    kind = reply.WhichOneof("response")
    assert kind in ("request_headers", "request_body")
    mutation = getattr(reply, kind).response.header_mutation
    fields = {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}
    assert fields.keys() == {DESTINATION, "accept-encoding"}
    assert list(mutation.remove_headers) == [
        *("authorization", "api-key", "x-api-key"),
        *(name.decode() for name in sorted(STEERING_HEADERS)),
    ]
    assert all(one.append_action == one.OVERWRITE_IF_EXISTS_OR_ADD for one in mutation.set_headers)
    assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == fields[DESTINATION]
    return fields[DESTINATION].split(",")


def kinds(replies: list[ProcessingResponse]) -> list[str | None]:
    return [reply.WhichOneof("response") for reply in replies]
