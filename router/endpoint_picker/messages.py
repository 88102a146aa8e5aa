"""The messages of Envoy's external processing as the Endpoint Picker Protocol of the Gateway API uses them.

What comes in is read here, what goes out is made here, as bytes: most replies are always the same. The
protocol: kubernetes-sigs/gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from router.endpoint_picker.destination import Destination
from router.endpoint_picker.ext_proc_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from router.proxy.request_head import READ_HEADERS, RequestHead
from router.proxy.router_error import RouterError

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
CHUNK_BYTES: Final = 62_000
"""The protocol recommends pieces of a body below 64 KiB."""
OVERWRITE: Final = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

CONTINUE_REQUEST_HEADERS: Final = ProcessingResponse(request_headers=HeadersResponse()).SerializeToString()
CONTINUE_REQUEST_BODY: Final = ProcessingResponse(request_body=BodyResponse()).SerializeToString()
CONTINUE_REQUEST_TRAILERS: Final = ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString()
CONTINUE_RESPONSE_HEADERS: Final = ProcessingResponse(response_headers=HeadersResponse()).SerializeToString()
CONTINUE_RESPONSE_BODY: Final = ProcessingResponse(response_body=BodyResponse()).SerializeToString()
CONTINUE_RESPONSE_TRAILERS: Final = ProcessingResponse(
    response_trailers=TrailersResponse()
).SerializeToString()


# --- what Envoy says ------------------------------------------------------------------------------


def request_head(headers: HttpHeaders) -> RequestHead:
    """The request's head, as a router that got it over HTTP would have it."""
    method = target = b""
    found: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    for name, value in _lines(headers.headers):
        if name == b":method":
            method = value
        elif name == b":path":
            target = value
        elif name in READ_HEADERS:
            found[name] = found[name] + b", " + value if name in found else value
        elif name[:1] != b":":
            kept.append(name + b": " + value)
    return RequestHead(method, target, False, found, kept)


def response_fields(headers: HttpHeaders, wanted: Iterable[bytes]) -> dict[bytes, bytes]:
    """Those of an answer's header fields that are ``wanted``."""
    return {name: value for name, value in _lines(headers.headers) if name in wanted}


def _lines(headers: HeaderMap) -> Iterator[tuple[bytes, bytes]]:
    for one in headers.headers:
        yield one.key.encode("latin-1", "replace"), one.raw_value or one.value.encode()


def subset_hint(message: ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that alone may be picked; ``None``: all may."""
    value = _metadata(message, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    listed = value.split(",") if isinstance(value, str) else value
    return frozenset(one.strip() for one in listed if isinstance(one, str) and one.strip())


def served_endpoint(message: ProcessingRequest) -> str | None:
    """Who answered, by the last of the tries that Envoy made; ``None``: it does not tell."""
    value = _metadata(message, NAMESPACE, SERVED)
    return value if isinstance(value, str) else None


def _metadata(message: ProcessingRequest, namespace: str, key: str) -> str | list[object] | None:
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata:
        return None
    fields = metadata[namespace].fields
    if key not in fields:
        return None
    value = fields[key]
    if value.WhichOneof("kind") == "list_value":
        return list(value.list_value)
    return value.string_value


# --- what Envoy is told ---------------------------------------------------------------------------


def picked(to: Destination, *, in_body_phase: bool, body_changed: bool = False) -> bytes:
    """Where the request goes: to the first endpoint, to the next if that fails, and so on.

    ``in_body_phase``: this is the reply to the whole body, not to the head; if it is ``body_changed``,
    ``to.body`` takes its place.
    """
    named = ",".join(to.endpoints)
    fields = {DESTINATION: named, **to.fields}
    common = CommonResponse()
    if body_changed:
        fields["content-length"] = str(len(to.body))
        common.body_mutation.body = to.body
    common.header_mutation.CopyFrom(_mutation(fields, to.removed))
    if in_body_phase:
        response = ProcessingResponse(request_body=BodyResponse(response=common))
    else:
        response = ProcessingResponse(request_headers=HeadersResponse(response=common))
    response.dynamic_metadata.update({NAMESPACE: {DESTINATION: named}})
    return response.SerializeToString()


def streamed_request(body: bytes, *, last: bool) -> Iterator[bytes]:
    """The request's body in pieces. ``last``: nothing comes after it."""
    ends = range(CHUNK_BYTES, len(body) + CHUNK_BYTES, CHUNK_BYTES) or (0,)
    for end in ends:
        piece = StreamedBodyResponse(body=body[end - CHUNK_BYTES if end else 0 : end])
        piece.end_of_stream = last and end >= len(body)
        yield ProcessingResponse(request_body=_streamed(piece)).SerializeToString()


def streamed_answer(body: bytes, *, last: bool) -> bytes:
    """A piece of the answer's body, as it came."""
    piece = StreamedBodyResponse(body=body, end_of_stream=last)
    return ProcessingResponse(response_body=_streamed(piece)).SerializeToString()


def _streamed(piece: StreamedBodyResponse) -> BodyResponse:
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))


def answer_head(fields: dict[str, str]) -> bytes:
    """The answer's head, with more fields."""
    common = CommonResponse(header_mutation=_mutation(fields))
    return ProcessingResponse(response_headers=HeadersResponse(response=common)).SerializeToString()


def refusal(error: RouterError, request_id: str) -> bytes:
    """An answer of the picker's own, in the place of one of a replica."""
    fields = {"content-type": "application/json"}
    if request_id:
        fields["x-request-id"] = request_id
    if error.retry_after_s is not None:
        fields["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        fields["www-authenticate"] = "Bearer"
    immediate = ImmediateResponse(
        status=HttpStatus(code=error.status),
        headers=_mutation(fields),
        body=error.body(request_id),
        details=f"warmroute_{error.code}",
    )
    return ProcessingResponse(immediate_response=immediate).SerializeToString()


def _mutation(fields: dict[str, str], removed: Iterable[str] = ()) -> HeaderMutation:
    return HeaderMutation(
        remove_headers=removed,
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name, raw_value=value.encode("ascii", "replace")),
                append_action=OVERWRITE,
            )
            for name, value in fields.items()
        ],
    )
