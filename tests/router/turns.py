"""Requests of tenants that wait in the router, and the order in which they go."""

from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.tenant import Tenant


def prompt(tenant: Tenant, name: int, blocks: int) -> Prompt:
    """One that shares nothing with those of other names."""
    made = Prompt(
        keys=range(name * 1_000_000, name * 1_000_000 + blocks),
        units=blocks * 16 + 3,
        layout=UniformLayout(16),
        stream=True,
    )
    made.tenant = tenant
    return made


def sent_in_turn(fleet: Fleet, running: InFlight) -> list[object]:
    """The contexts of all that wait, in the order in which they go."""
    order, in_flight, now = [], [running], 0.0
    while in_flight:
        now += 0.05
        fleet.first_token(in_flight.pop(0), now)
        for one in fleet.outbox:
            assert one.flight is not None
            order.append(one.context)
            in_flight.append(one.flight)
        fleet.outbox.clear()
    return order
