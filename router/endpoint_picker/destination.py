"""Where one request goes, and as what: its endpoints, the keys and the body that the replicas there get.

Whichever of the endpoints it reaches gets the same bytes. So only those are next in line that want the same
key as the first, and take a tenant's cache salt as it does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.endpoint_picker.endpoints import Endpoints
from router.proxy.request_head import CLIENT_KEYS, STEERING_HEADERS
from router.proxy.service import Service
from router.proxy.settings import ProxySettings
from router.proxy.tenant_request import SALT_HEADERS, without_salt
from router.proxy.trace_context import TRACE_FIELDS
from router.routing.replica_state import ReplicaState

_CLIENT_KEYS = tuple(name.decode() for name in CLIENT_KEYS)
_STEERING = tuple(name.decode() for name in sorted(STEERING_HEADERS))
_SALTS = tuple(name.decode() for name in sorted(SALT_HEADERS))


@dataclass(frozen=True, slots=True)
class Destination:
    """What Envoy is told."""

    endpoints: Sequence[str]
    """``IP:PORT``, in the order in which they are tried."""
    body: bytes
    fields: dict[str, str]
    """Header fields that are set."""
    removed: Sequence[str]
    """Header fields that are taken out."""


def destination(
    service: Service,
    settings: ProxySettings,
    endpoints: Endpoints,
    replicas: Sequence[ReplicaState],
    body: bytes,
    salt_bytes: int | None,
    kv_source: tuple[str, str] | None = None,
    trace: Mapping[str, str] | None = None,
) -> Destination:
    """``replicas``: the one that was chosen, then those next in line.

    ``kv_source``: the header field that tells where the first finds its KV. No client may say that.

    ``trace``: header fields of the trace context that takes the place of the client's, if one does.

    ``salt_bytes``: how much of the body's end is a tenant's cache salt; ``None``: tenants are not told apart.
    """
    first = service.pool(replicas[0])
    named = []
    for replica in replicas:
        pool, endpoint = service.pool(replica), endpoints.of(replica)
        same_salt = salt_bytes is None or pool.takes_salt is first.takes_salt
        if endpoint is not None and pool.key_line == first.key_line and same_salt:
            named.append(endpoint)
    # So that an answer can be read on its way.
    fields = {"accept-encoding": "identity"}
    removed = () if settings.forward_client_key else _CLIENT_KEYS
    if first.key_line:
        fields["authorization"] = first.key_line.partition(b": ")[2].strip().decode()
        removed = _CLIENT_KEYS[1:]
    removed += tuple(name for name in _STEERING if kv_source is None or name != kv_source[0])
    if kv_source is not None:
        fields[kv_source[0]] = kv_source[1]
    if trace is not None:
        fields.update(trace)
        removed += tuple(name for name in TRACE_FIELDS if name not in trace)
    if salt_bytes is not None:
        removed += _SALTS
        body = body if first.takes_salt else without_salt(body, salt_bytes)
    return Destination(named, body, fields, removed)
