"""Whether tenants take fair turns: only requests that wait in the router do, not every config lets them."""

from router.config import RouterConfig

HOLDING_POLICY = "predicted_finish"
"""The only kind whose requests wait in the router: the others do not say when a replica has room."""


def never_held(config: RouterConfig) -> str | None:
    """Why no request ever waits in the router; ``None`` where they do.

    >>> from router.config import parse_config
    >>> config = {"policy": {"kind": "round_robin"}, "replicas": [{"url": "http://10.0.0.1:8000"}]}
    >>> never_held(parse_config(config, "router.yaml"))
    'policy.kind round_robin holds no requests'
    """
    if config.policy.kind != HOLDING_POLICY:
        return f"policy.kind {config.policy.kind} holds no requests"
    return None if config.hold.enabled else "hold.enabled is false"


def unfair_turns(config: RouterConfig) -> str | None:
    """What the operator of ``tenants`` has to know about who waits for whom; ``None``: they take turns."""
    if config.tenants is None:
        return None
    why = never_held(config)
    if why is not None:
        return (
            f"tenants: {why}, so tenants take no turns while the fleet is busy and one can crowd out "
            "the others; weight and priority have no effect, limits have. "
            f"Fair turns need policy.kind {HOLDING_POLICY} and hold.enabled"
        )
    unheld = [kind for kind in config.policy.selectable if kind != HOLDING_POLICY]
    if unheld:
        return (
            f"tenants: requests that ask for {', '.join(unheld)} are not held and go before tenants "
            "whose turn it is: take them out of policy.selectable if turns are to be fair"
        )
    return None
