"""What differs between two configs of a running router, and what cannot."""

from dataclasses import dataclass

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.replica_config import ReplicaConfig

FIXED = ("listen", "admin", "models", "state", "tracing", "seed")
"""Keys that are read once, at the start; of ``state`` and ``tracing`` all but credentials."""
_SAME_SERVER = (
    *("cost", "weight", "tags", "model", "api_key", "tls"),
    *("role", "kv_pull", "kv_source", "transfer"),
)
"""Keys of a replica that say nothing of which server it is, nor of how it names its blocks."""


@dataclass(frozen=True, slots=True)
class ReplicaChanges:
    """How one config's replicas become another's. A replica that is another server leaves and joins."""

    joining: tuple[ReplicaConfig, ...]
    leaving: tuple[str, ...]
    """Names."""
    staying: tuple[ReplicaConfig, ...]
    """As they are now; what the router learned of them is kept."""


def replica_changes(old: RouterConfig, new: RouterConfig) -> ReplicaChanges:
    """From ``old`` to ``new``. Replicas are told apart by name."""
    before = {replica.effective_name: _server(replica) for replica in old.replicas}
    staying = [r for r in new.replicas if before.get(r.effective_name) == _server(r)]
    names = {replica.effective_name for replica in staying}
    return ReplicaChanges(
        joining=tuple(r for r in new.replicas if r.effective_name not in names),
        leaving=tuple(name for name in before if name not in names),
        staying=tuple(staying),
    )


def _server(replica: ReplicaConfig) -> ReplicaConfig:
    plain = ReplicaConfig(url=replica.url)
    named = {key: getattr(plain, key) for key in _SAME_SERVER} | {"name": replica.effective_name}
    return replica.model_copy(update=named)


def _fixed(config: RouterConfig, key: str) -> object:
    if key == "state":
        return config.state.without_credentials()
    if key == "tracing" and config.tracing is not None:
        return config.tracing.without_headers()
    return getattr(config, key)


def require_changeable(old: RouterConfig, new: RouterConfig) -> None:
    """Raise ``ConfigError`` if something differs that a running router cannot change."""
    fixed = [key for key in FIXED if _fixed(old, key) != _fixed(new, key)]
    if (old.tls is None) != (new.tls is None):
        fixed.append("tls")
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: cannot be changed while the router runs; restart it, or put back what it "
            "was started with. Nothing was applied"
        )
    bound = {
        r.kv_events.endpoint: r.effective_name for r in old.replicas if r.kv_events and r.kv_events.binds
    }
    for replica in replica_changes(old, new).joining:
        events = replica.kv_events
        if events is not None and events.binds and events.endpoint in bound:
            raise ConfigError(
                f"replicas.kv_events: {replica.effective_name} wants {events.endpoint}, where "
                f"{bound[events.endpoint]} is still listened for; reload without it first"
            )
