"""Answers the router makes itself: the table of its errors, and their bytes in the OpenAI shape.

Messages are fixed: no replica addresses, no exception texts. What a client may be told beyond them
(which replica, with ``expose_replica_urls``) is passed in as ``detail``.
"""

from dataclasses import dataclass, replace
from http import HTTPStatus
from math import ceil

import orjson


@dataclass(frozen=True, slots=True)
class RouterError:
    """One way in which the router itself refuses or fails a request."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None
    allow: str | None = None
    """Methods that the route has, for a 405."""
    param: str | None = None
    """The request's field that is at fault."""

    @property
    def kind(self) -> str:
        """OpenAI's ``type``: whose fault it is. OpenAI's own 429 have the name of the limit there ("tokens");
        clients know them by the status, and those of several APIs by this word, which is Anthropic's."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def at(self, limit: float) -> "RouterError":
        """The same with the limit that was reached, where the message has a place for it.

        >>> IDLE_TIMEOUT.at(2.5).message
        'The replica sent nothing for 2.5 s (timeouts.idle_s)'
        """
        shown = str(limit) if isinstance(limit, int) else f"{limit:g}"
        return replace(self, message=self.message.format(limit=shown))

    def body(self, request_id: str, detail: str = "") -> bytes:
        """The JSON that clients and SDKs read.

        >>> BAD_REQUEST.body("r-1")[:63]
        b'{"error":{"message":"The request is not valid HTTP/1.1 (request'
        """
        message = self.text(request_id, detail)
        error = {"message": message, "type": self.kind, "code": self.code, "param": self.param}
        return orjson.dumps({"error": error})

    def text(self, request_id: str, detail: str = "") -> str:
        """The message with what the client may be told beyond it."""
        message = f"{self.message} (request id {request_id})" if request_id else self.message
        return f"{message}: {detail}" if detail else message


BAD_REQUEST = RouterError(400, "bad_http", "The request is not valid HTTP/1.1")
KEY_MISSING = RouterError(
    401, "missing_api_key", "This port wants a key; expected the header Authorization: Bearer KEY"
)
KEY_UNKNOWN = RouterError(401, "invalid_api_key", "The key is not one of this port's")
KEY_OF_OTHER_PORT = RouterError(403, "wrong_port", "The key is for the other port: public or admin")
ORIGIN_NOT_ALLOWED = RouterError(
    403, "origin_not_allowed", "Pages of this origin may not use the router (cors.origins)"
)
PATH_REFUSED = RouterError(
    403, "path_refused", "The operator has closed this path to clients (allowed_paths, refused_paths)"
)
NOT_FOUND = RouterError(404, "not_found", "Unknown path; expected /v1/..., /health or /readiness")
MODEL_NOT_FOUND = RouterError(404, "model_not_found", "No replica serves the requested model; see /v1/models")
CONTROL_FIELD = RouterError(
    400,
    "control_field",
    "The request sets a field that steers the engine; the operator may allow it (client_control_fields)",
)
MODEL_NOT_ALLOWED = RouterError(
    403,
    "model_not_allowed",
    "The key's tenant may not use the requested model; see /v1/models",
    param="model",
)
CACHE_SHARED = RouterError(
    403,
    "cache_shared",
    "Tenants would share a prefix cache: no replica of the model reads a cache salt at this path; the "
    "operator may allow that (tenants.isolation: warn)",
)
BODY_UNREADABLE = RouterError(
    400,
    "body_unreadable",
    "The body is not a JSON object as RFC 8259 has it; what tenants send is read before it is passed on",
)
SALT_IN_FORM = RouterError(
    400,
    "salt_in_form",
    "The form sets a field that parts the cache, or cannot be read for that; expected one boundary, plain "
    "names and none of cache_salt, extra_key, extra_body, nvext, vllm_xargs",
)
BODY_HIDDEN = RouterError(
    500,
    "body_hidden",
    "Tenants are configured, but the gateway does not send requests' bodies; expected request_body_mode "
    "FULL_DUPLEX_STREAMED or BUFFERED",
)
GATEWAY_ORDER = RouterError(
    500,
    "gateway_order",
    "The gateway did not send the request's head first, and once; expected request_header_mode SEND",
)
TRAILERS_ALONE = RouterError(400, "trailers_alone", "The request has trailers and no body; expected a body")
REQUEST_TIMEOUT = RouterError(
    408,
    "request_timeout",
    "The request did not go on arriving within {limit} s (timeouts.client_header_s); send it again",
)
BODY_TOO_LARGE = RouterError(
    413, "body_too_large", "The request body is longer than {limit} bytes (limits.body_bytes)"
)
TOO_MUCH_RECEIVED = RouterError(
    503,
    "too_much_received",
    "The router is receiving bodies of more than {limit} bytes in all (limits.receiving_bytes); try again",
    retry_after_s=1,
)
RECEIVING_SHARE = RouterError(
    429,
    "receiving_share",
    "The tenant's bodies that are not whole yet take the room that others have a share in "
    "(limits.receiving_bytes); try again",
    retry_after_s=1,
)
BODY_COMPRESSED = RouterError(
    415,
    "body_compressed",
    "The router reads bodies before it passes them on; send it plain, without x-body-compressed",
)
BODY_CROWDED = RouterError(
    413,
    "body_crowded",
    "The request body has more JSON values than any request needs; expected at most 100,000 strings, 100,000 "
    "lists and objects, 1,500,000 values",
)
HEADERS_TOO_LARGE = RouterError(
    431, "headers_too_large", "The request head is longer than {limit} bytes (limits.header_bytes)"
)
NOT_IMPLEMENTED = RouterError(501, "not_implemented", "The router does not open tunnels")
VERSION = RouterError(505, "http_version", "Expected HTTP/1.1 or HTTP/1.0")
LOOP = RouterError(508, "loop", "The request came back to the router that sent it: a replica leads there")
INTERNAL = RouterError(500, "internal_error", "The router failed; this is a fault to report")
REPLICA_UNREACHABLE = RouterError(502, "replica_unreachable", "The replica could not be reached")
REPLICA_CLOSED = RouterError(502, "replica_closed", "The replica closed the connection before it answered")
REPLICA_GARBAGE = RouterError(502, "replica_garbage", "The replica's answer is not valid HTTP/1.1")
REPLICA_BROKEN = RouterError(502, "replica_broken", "The replica broke off in the middle of its answer")
HOLD_TIMEOUT = RouterError(
    429,
    "hold_timeout",
    "All replicas are busy; the request waited {limit} s (hold.max_wait_s)",
    retry_after_s=5,
)
HOLD_FULL = RouterError(
    429,
    "hold_full",
    "All replicas are busy and {limit} requests wait already (hold.max_requests)",
    retry_after_s=5,
)
HOLD_SHARE = RouterError(
    429,
    "hold_share",
    "All replicas are busy and the tenant's requests wait already where others' have a place, too",
    retry_after_s=5,
)
_TENANT_LIMITS = {
    "requests_per_s": "The tenant's limit of {limit} requests per second is reached (limits.requests_per_s)",
    "tokens_per_s": "The tenant's limit of {limit} tokens per second is reached (limits.tokens_per_s)",
    "concurrent": "The tenant's limit of {limit} requests at once is reached (limits.concurrent)",
}
NO_REPLICA = RouterError(503, "no_replica", "No replica can take the request now", retry_after_s=1)
OUT_OF_SOCKETS = RouterError(
    503,
    "out_of_sockets",
    "The router has no file descriptor or port left to reach a replica with; try again",
    retry_after_s=1,
)
SHUTTING_DOWN = RouterError(503, "shutting_down", "The router is shutting down", retry_after_s=1)
TOO_MANY_CONNECTIONS = RouterError(
    503,
    "too_many_connections",
    "There are {limit} connections already (limits.client_connections)",
    retry_after_s=1,
)
CONNECT_TIMEOUT = RouterError(
    504, "connect_timeout", "The replica accepted no connection within {limit} s (timeouts.connect_s)"
)
FIRST_BYTE_TIMEOUT = RouterError(
    504,
    "first_byte_timeout",
    "The replica did not begin its answer within {limit} s (timeouts.first_byte_s)",
)
IDLE_TIMEOUT = RouterError(504, "idle_timeout", "The replica sent nothing for {limit} s (timeouts.idle_s)")
TOTAL_TIMEOUT = RouterError(
    504, "total_timeout", "The answer was not complete within {limit} s (timeouts.total_s)"
)


def method_not_allowed(allow: str) -> RouterError:
    """A 405 for one of the router's own routes, which has the methods ``allow``."""
    return RouterError(405, "method_not_allowed", f"This path allows {allow}", allow=allow)


def limit_reached(name: str, limit: float, wait_s: float) -> RouterError:
    """A 429 for one of a tenant's limits (``TenantLimits``), which lets more pass in ``wait_s`` seconds.

    >>> error = limit_reached("requests_per_s", 2.0, 0.3)
    >>> error.code, error.retry_after_s
    ('tenant_requests_per_s', 1)
    >>> error.message
    "The tenant's limit of 2 requests per second is reached (limits.requests_per_s)"
    """
    error = RouterError(
        429, f"tenant_{name}", _TENANT_LIMITS[name], retry_after_s=max(1, ceil(min(wait_s, 86_400.0)))
    )
    return error.at(limit)


def error_answer(
    error: RouterError,
    request_id: str,
    *,
    keep_alive: bool,
    head_only: bool = False,
    detail: str = "",
    cors: bytes = b"",
) -> bytes:
    """Head and body of the answer that tells ``error``. ``cors``: header lines, each ended by CRLF."""
    extra = cors
    if error.retry_after_s is not None:
        extra += b"retry-after: %d\r\n" % error.retry_after_s
    if error.allow is not None:
        extra += b"allow: %b\r\n" % error.allow.encode()
    if error.status == 401:
        extra += b"www-authenticate: Bearer\r\n"
    body = error.body(request_id, detail)
    return json_answer(
        error.status, body, request_id, keep_alive=keep_alive, head_only=head_only, extra=extra
    )


def json_answer(
    status: int,
    body: bytes,
    request_id: str,
    *,
    keep_alive: bool,
    head_only: bool = False,
    extra: bytes = b"",
) -> bytes:
    """A whole answer of the router's own. ``extra``: more header lines, each ended by CRLF."""
    return b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b%b%b\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        len(body),
        b"x-request-id: %b\r\n" % request_id.encode() if request_id else b"",
        extra,
        b"connection: keep-alive\r\n" if keep_alive else b"connection: close\r\n",
        b"" if head_only else body,
    )
