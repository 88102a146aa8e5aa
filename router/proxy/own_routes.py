"""The routes that the router answers itself, and which paths are routed."""

import orjson

from router.proxy.request_head import RequestHead, has_dot_segments
from router.proxy.router_error import (
    NO_REPLICA,
    NOT_FOUND,
    RouterError,
    error_answer,
    json_answer,
    method_not_allowed,
)
from router.proxy.service import Service
from router.proxy.tenancy import Caller

_OPEN = frozenset({b"/health", b"/readiness"})
_OWN = _OPEN | {b"/v1/models"}


def is_routed(head: RequestHead) -> bool:
    """Whether a replica answers this request: any method and path under ``/v1/`` but the model list."""
    path = head.path
    if not path.startswith(b"/v1/") or has_dot_segments(path):
        return False
    return path != b"/v1/models"


def is_open(head: RequestHead) -> bool:
    """Whether this request needs no key: balancers and supervisors ask so."""
    return head.path in _OPEN


def own_answer(
    service: Service,
    head: RequestHead,
    request_id: bytes,
    caller: Caller | None,
    *,
    keep_alive: bool,
    cors: bytes,
) -> bytes:
    """The whole answer to a request that is not routed. ``caller``: whose it is, where that is told apart.

    ``cors``: header lines of it, each ended by CRLF.
    """
    head_only = head.method == b"HEAD"
    error: RouterError | None = None
    body: bytes | None = None
    status = 200
    if head.path not in _OWN:
        error = NOT_FOUND
    elif head.method not in (b"GET", b"HEAD"):
        error = method_not_allowed("GET, HEAD")
    elif head.path == b"/health":
        body = b'{"status":"ok"}'
    elif head.path == b"/readiness":
        status, body = readiness(service)
    else:
        body = model_list(service, caller)
    if body is None:
        error = error or NO_REPLICA
        service.count_error(error)
        return error_answer(error, request_id.decode(), keep_alive=keep_alive, head_only=head_only, cors=cors)
    return json_answer(
        status, body, request_id.decode(), keep_alive=keep_alive, head_only=head_only, extra=cors
    )


def readiness(service: Service) -> tuple[int, bytes]:
    """Status and body: whether this router should get requests, and if not, why."""
    if service.shutting_down:
        return 503, orjson.dumps({"status": "not ready", "reason": "stopping"})
    if service.fleet.ready:
        service.was_ready = True
        return 200, b'{"status":"ready"}'
    if not service.fleet.replicas:
        reason = "no replicas: none configured, found or added yet"
    else:
        reason = "no usable replica"
    if service.was_ready and service.settings.ready_without_replicas:
        return 200, orjson.dumps({"status": "ready", "reason": f"{reason}; this router says so itself"})
    return 503, orjson.dumps({"status": "not ready", "reason": reason})


def model_list(service: Service, caller: Caller | None) -> bytes | None:
    """OpenAI's model list, the union over the usable replicas; None when there is none to be had.

    Of these only those that ``caller`` may use.
    """
    models: set[str] = set()
    known = False
    for replica in service.fleet.replicas:
        if replica.usable and replica.models is not None:
            known = True
            models |= replica.models
    if not known:
        return None
    if caller is not None and caller.models is not None:
        models &= caller.models
    listed = [
        {"id": model, "object": "model", "created": 0, "owned_by": "warmroute"} for model in sorted(models)
    ]
    return orjson.dumps({"object": "list", "data": listed})
