"""What becomes of a request, told by its head alone: refused, answered here, or how it is passed on."""

import asyncio

from router.proxy.own_routes import is_open, is_routed
from router.proxy.request_head import ForwardedAs, RequestHead, client_keys
from router.proxy.router_error import RouterError
from router.proxy.settings import ProxySettings
from router.proxy.trace_context import without_trace_context


class Forwarding:
    """Made once for all requests with this head under these settings on one connection."""

    __slots__ = ("client_keys", "head", "lines", "refusal", "routed", "settings")

    def __init__(self, head: RequestHead, settings: ProxySettings, client: asyncio.Transport) -> None:
        self.head = head
        self.settings = settings
        self.refusal: RouterError | None = None
        """Why it goes nowhere."""
        if not is_open(head):
            self.refusal = settings.keys.refusal(head.found.get(b"authorization"))
        self.routed = is_routed(head)
        """A replica answers it."""
        peer = client.get_extra_info("peername")
        address = peer[0].encode("ascii", "ignore") if isinstance(peer, tuple) and peer else b""
        scheme = b"https" if client.get_extra_info("ssl_object") is not None else b"http"
        kept = without_trace_context(head.kept) if settings.traced else head.kept
        self.lines = ForwardedAs(address, scheme).lines(head, kept)
        self.client_keys = client_keys(head) if settings.forward_client_key else b""
        """For replicas that have no key of their own."""
