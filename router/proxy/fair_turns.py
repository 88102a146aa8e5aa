"""Which requests wait in the router while replicas are busy: all of ``predicted_finish``, all of tenants.

Where tenants are told apart they take turns, whatever the policy: a policy says where a request goes, not
before whom. Without tenants nobody waits for the policies that do not count on it.
"""

from router.config import RouterConfig

HOLDING_POLICY = "predicted_finish"


def never_held(config: RouterConfig) -> str | None:
    """Why no request ever waits in the router; ``None`` where they do.

    >>> from router.config import parse_config
    >>> config = {"policy": {"kind": "round_robin"}, "replicas": [{"url": "http://10.0.0.1:8000"}]}
    >>> never_held(parse_config(config, "router.yaml"))
    'policy.kind round_robin holds no requests'
    >>> tenants = {"salt_secret": "0123456789abcdef", "members": [{"name": "acme", "keys": ["sk-acme"]}]}
    >>> never_held(parse_config(config | {"tenants": tenants}, "router.yaml"))
    """
    if not config.hold.enabled:
        return "hold.enabled is false"
    if config.policy.kind != HOLDING_POLICY and config.tenants is None:
        return f"policy.kind {config.policy.kind} holds no requests"
    return None


def unfair_turns(config: RouterConfig) -> str | None:
    """What the operator of ``tenants`` has to know about who waits for whom; ``None``: they take turns."""
    if config.tenants is None or config.hold.enabled:
        return None
    return (
        "tenants: hold.enabled is false, so tenants take no turns while the fleet is busy and one can crowd "
        "out the others; weight and priority have no effect, limits have"
    )
