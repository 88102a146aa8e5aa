"""How each replica is reached: its address, its key, whom to trust there. The same for traffic and probes."""

import ssl
from dataclasses import dataclass, field

from router.config import RouterConfig
from router.engines import ENGINES
from router.proxy.tls import replica_context
from router.replica_config import ReplicaTlsConfig


@dataclass(frozen=True, slots=True)
class ReplicaAccess:
    """One replica's."""

    url: str
    """Scheme, host and port; no path."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    tls: ssl.SSLContext | None = None
    kind: str = "auto"
    """Which engine it is taken for."""
    takes_salt: bool = True
    """It may be sent ``cache_salt``: a field that OpenAI does not have."""

    @property
    def headers(self) -> dict[str, str]:
        """What every request there carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}


def replica_accesses(config: RouterConfig) -> dict[str, ReplicaAccess]:
    """By replica name. Raises ``ConfigError`` where a file cannot be used."""
    contexts: dict[ReplicaTlsConfig | None, ssl.SSLContext] = {}
    found = {}
    for replica in config.replicas:
        tls = None
        if replica.url.startswith("https:"):
            tls = contexts.get(replica.tls)
            if tls is None:
                tls = contexts[replica.tls] = replica_context(replica.tls)
        key = replica.api_key or config.api_key
        found[replica.effective_name] = ReplicaAccess(
            replica.url,
            None if key is None else key.get_secret_value(),
            tls,
            kind=replica.kind,
            takes_salt=replica.kind == "auto" or ENGINES[replica.kind].takes_salt,
        )
    return found
