"""Why a request is turned away before a replica is chosen: fields it may not set, limits, no room to wait."""

from dataclasses import replace

from router.proxy.admission import Admission
from router.proxy.form_fields import content_types, set_in_form
from router.proxy.request_head import RequestHead
from router.proxy.router_error import CONTROL_FIELD, HOLD_FULL, HOLD_SHARE, RouterError
from router.proxy.service import Service
from router.proxy.settings import ProxySettings
from router.routing.control_fields import CONTROL_FIELDS, refused_field
from router.routing.prompt_blocks import UNREADABLE, Prompt


def entrance_refusal(
    service: Service,
    settings: ProxySettings,
    head: RequestHead,
    prompt: Prompt,
    body: bytes,
    admission: Admission | None,
    now: float,
) -> RouterError | None:
    """What the client is told; ``None``: the request may go on. ``body``: as it came."""
    allowed = settings.client_control_fields
    field = refused_field(prompt.controls, allowed, body if prompt is UNREADABLE else b"")
    if field is None and body and not prompt.units:
        field = set_in_form(content_types(head), body, CONTROL_FIELDS - allowed)
    if field is not None:
        return replace(CONTROL_FIELD, param=field or None)
    most = settings.hold_max_requests
    room = most - service.fleet.held
    if room <= 0:
        return HOLD_FULL.at(most)
    if admission is not None:
        caller = admission.caller
        return caller.refusal(now) or (None if caller.may_hold(room) else HOLD_SHARE)
    return None
