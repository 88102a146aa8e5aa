"""What becomes of a request, told by its head alone: refused, answered here, or how it is passed on."""

import asyncio

from router.proxy.cors import is_preflight, without_origin
from router.proxy.own_routes import is_open, is_routed
from router.proxy.request_head import COMPRESSED, ForwardedAs, RequestHead, client_keys
from router.proxy.router_error import BODY_COMPRESSED, LOOP, PATH_REFUSED, RouterError
from router.proxy.settings import ProxySettings
from router.proxy.tenancy import Caller
from router.proxy.tenant_request import without_salts
from router.proxy.trace_context import without_trace_context


class Forwarding:
    """Made once for all requests with this head, under these settings, of one client."""

    __slots__ = (
        "_address",
        "_scheme",
        "caller",
        "client_keys",
        "cors_lines",
        "head",
        "lines",
        "preflight",
        "refusal",
        "routed",
        "settings",
    )

    def __init__(self, head: RequestHead, settings: ProxySettings, address: bytes, scheme: bytes) -> None:
        """``address``, ``scheme``: the client's, as replicas are told."""
        self.head = head
        self.settings = settings
        self._address = address
        self._scheme = scheme
        cors = settings.cors
        self.preflight = cors is not None and is_preflight(head)
        """A browser asks what it may send; the router answers."""
        self.cors_lines = b"" if cors is None else cors.lines(head)
        """Header lines of whatever is answered."""
        open_to_all = is_open(head) or self.preflight
        routed = is_routed(head)
        caller, refusal = (None, None) if open_to_all else admitted(settings, head, routed=routed)
        if routed and refusal is None and any(is_via(line, settings.hop) for line in head.kept):
            refusal = LOOP
        self.refusal = refusal
        """Why it goes nowhere."""
        self.caller = caller
        """Whose it is, where tenants are told apart."""
        self.routed = routed
        """A replica answers it."""
        kept = without_trace_context(head.kept) if settings.traced else head.kept
        if self.caller is not None:
            kept = without_salts(kept)
        if cors is not None:
            kept = without_origin(kept)
        self.lines = ForwardedAs(address, scheme, settings.hop).lines(head, kept)
        self.client_keys = client_keys(head) if settings.forward_client_key else b""
        """For replicas that have no key of their own."""

    def fits(self, head: RequestHead, settings: ProxySettings, address: bytes, scheme: bytes) -> bool:
        """One for these would be the same."""
        return (
            self.head is head
            and self.settings is settings
            and self._address == address
            and self._scheme == scheme
        )


class LastForwarding:
    """The one that was made last, for any connection: a new one's is often the same."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: Forwarding | None = None

    def of(self, head: RequestHead, settings: ProxySettings, client: asyncio.Transport) -> Forwarding:
        """What becomes of requests with ``head`` that come over ``client``."""
        peer = client.get_extra_info("peername")
        address = peer[0].encode("ascii", "ignore") if isinstance(peer, tuple) and peer else b""
        scheme = b"https" if client.get_extra_info("ssl_object") is not None else b"http"
        made = self._made
        if made is None or not made.fits(head, settings, address, scheme):
            made = self._made = Forwarding(head, settings, address, scheme)
        return made


def admitted(
    settings: ProxySettings, head: RequestHead, *, routed: bool
) -> tuple[Caller | None, RouterError | None]:
    """Whose the request is, where tenants are told apart; and why it goes nowhere.

    ``routed``: a replica is to answer it.
    """
    closed = None
    if routed:
        if settings.paths.refuse(head.method, head.path):
            closed = PATH_REFUSED
        elif COMPRESSED in head.found:
            closed = BODY_COMPRESSED
    authorization = head.found.get(b"authorization")
    tenancy = settings.tenancy
    if tenancy is None:
        return None, settings.keys.refusal(authorization) or closed
    found = tenancy.caller(authorization)
    if isinstance(found, RouterError):
        return None, found
    return found, closed or (found.path_refusal(head.path) if routed else None)


def is_via(line: bytes, hop: bytes) -> bool:
    """Whether a header ``line`` says that the request has passed ``hop``."""
    return line[:4].lower() == b"via:" and hop in line
