"""The keys of ``tiers.peers:`` in a replica's YAML."""

from typing import Annotated

from pydantic import AfterValidator, PositiveFloat, PositiveInt, field_validator

from replica.config_values import Secret, Section, host_and_port
from replica.peers.peer_limits import PeerLimits
from replica.peers.source_rule import AllowedPeers

MIB = 2**20


class PeersConfig(Section):
    """Other replicas of the same model, which give their KV to this one and get its."""

    secret: Secret
    """The same in all of them: who has it gets KV, and is believed."""
    listen: Annotated[str, AfterValidator(host_and_port)] | None = None
    """HOST:PORT where they are answered; unless set, this replica only asks."""
    allow: tuple[str, ...] = ()
    """HOST:PORT of those that a request may name in ``x-warmroute-kv-source``; HOST may be a network
    (``10.0.0.0/8``) or a pattern of names (``*.pods``)."""
    router_key: Secret | None = None
    """Routers that sign with it may name anybody."""
    connections: PositiveInt = 8
    """Peers answered at once; others compute."""
    mib_in_flight: PositiveInt = 64
    """Copied for peers and not yet taken by them, in all."""
    serve_s: PositiveFloat = 30.0
    """For one peer; what it lacks then it computes."""

    @field_validator("allow")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            AllowedPeers.read(entry)
        return value

    def limits(self) -> PeerLimits:
        """For the code below."""
        return PeerLimits(
            secret=self.secret.get_secret_value(),
            listen=self.listen,
            allow=self.allow,
            router_key=None if self.router_key is None else self.router_key.get_secret_value(),
            connections=self.connections,
            bytes_in_flight=self.mib_in_flight * MIB,
            serve_s=self.serve_s,
        )
