"""What the span of a request says that the router carried itself."""

from typing import TYPE_CHECKING

from router.proxy.traced_request import Sent, TracedRequest

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange


def traced(exchange: "Exchange", status: int) -> TracedRequest:
    """``exchange`` is about to end; the client got ``status``."""
    tries, relay = exchange.tries, exchange.relay
    sent = None
    if tries is not None:
        attempt = tries.attempt
        sent = Sent(attempt.name, attempt.decision, tries.began_at - exchange.started_at, tries.count)
    return TracedRequest(
        status=status,
        request_id=exchange.request_id,
        model=exchange.prompt.model,
        error_code=exchange.error_code,
        tenant=None if exchange.admission is None else exchange.admission.caller.tenant.name,
        sent=sent,
        ttft_s=None if relay is None else relay.ttft_s,
        usage=None if relay is None else relay.usage,
    )
