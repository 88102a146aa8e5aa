"""A request whose prompt was read, before the fleet: refused, booked on a replica, or held.

One rule for requests that came in through the router's own port and for those that a gateway asks about.
"""

from typing import Any

from router.proxy.admission import Admission
from router.proxy.entrance import entrance_refusal
from router.proxy.prefill_request import SPLIT_PATHS, splittable
from router.proxy.request_head import RequestHead
from router.proxy.router_error import MODEL_NOT_FOUND, NO_REPLICA, RouterError
from router.proxy.service import Service
from router.proxy.settings import ProxySettings
from router.routing.decision import NoReplica
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt


def submitted(
    service: Service,
    settings: ProxySettings,
    head: RequestHead,
    prompt: Prompt,
    body: bytes,
    admission: Admission | None,
    context: Any,
    since: float,
    now: float,
    within: frozenset[int] | None,
    *,
    moves_kv: bool,
) -> InFlight | Held | RouterError:
    """What becomes of it. ``since``: when the decision began; ``moves_kv``: it may be computed in two steps.

    The caller sends what the fleet released meanwhile, after it has taken up what it gets here.
    """
    refusal = entrance_refusal(service, settings, head, prompt, body, admission, now)
    if refusal is not None:
        return refusal
    fleet = service.fleet
    try:
        outcome = fleet.submit(
            prompt,
            now,
            session=head.session,
            policy=head.policy,
            context=context,
            within=within,
            two_steps=moves_kv and head.method == b"POST" and head.path in SPLIT_PATHS and splittable(body),
        )
    except NoReplica as error:
        return MODEL_NOT_FOUND if error.why == "unknown_model" else NO_REPLICA
    service.counters.decision_s.add(service.clock() - since)
    if admission is not None:
        reply_tokens = int(fleet.traffic.expected_output_tokens(prompt.max_tokens))
        admission.began(fleet.caches.prompt_tokens(prompt), reply_tokens, now)
    if isinstance(outcome, Held):
        if admission is not None:
            admission.held(True)
        service.hold_began()
    return outcome
