"""What this replica gives its peers and asks of them, as plain values."""

from dataclasses import dataclass, field

from replica.peers.peer_wire import key_of


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """One replica's."""

    secret: str = field(repr=False)
    """The same in all replicas that give each other KV."""
    listen: str | None = None
    """HOST:PORT where peers are answered; None: this one only asks."""
    allow: tuple[str, ...] = ()
    """Whom requests may name as their source; see ``source_rule``."""
    router_key: str | None = field(default=None, repr=False)
    """Routers that have it may name anybody."""
    connections: int = 8
    """Peers answered at once."""
    bytes_in_flight: int = 64 * 2**20
    """Copied for peers and not yet taken by them, over all connections."""
    serve_s: float = 30.0
    """For one peer."""

    @property
    def key(self) -> bytes:
        """For everything that is signed."""
        return key_of(self.secret)

    @property
    def signing_key(self) -> bytes | None:
        """For what routers sign."""
        return None if self.router_key is None else self.router_key.encode()

    def piece_blocks(self, block_bytes: int, most_bytes: int) -> int:
        """Blocks copied at once for one connection, at least one.

        Two pieces of each connection are in flight: one in the socket's buffer, one that is being made.

        >>> PeerLimits("s", connections=4, bytes_in_flight=8_000_000).piece_blocks(100_000, 4_000_000)
        10
        """
        return max(1, min(most_bytes, self.bytes_in_flight // (2 * self.connections)) // block_bytes)
