"""What connections to replicas and attempts tell whoever asked: ``Tries``, or ``PrefillStep`` before it."""

from typing import TYPE_CHECKING

from router.proxy.response_head import ResponseHead
from router.proxy.settings import ProxySettings

if TYPE_CHECKING:
    from router.proxy.replica_connection import ReplicaConnection
    from router.proxy.replica_pool import ReplicaPool


class Asker:
    """One request to one replica at a time."""

    __slots__ = ("settings",)

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings

    def request(self, pool: "ReplicaPool") -> tuple[bytes, bytes]:
        """What the replica of ``pool`` gets: the head, a short body with it, and then what is left."""
        raise NotImplementedError

    def connect_failed(self, why: str, *, own: bool) -> None:
        """The attempt could make no connection. ``own``: because this process had no socket for it."""
        raise NotImplementedError

    def answer_began(
        self, connection: "ReplicaConnection", head: ResponseHead, data: bytes, start: int
    ) -> None:
        """An answer's head is here, and in ``data[start:]`` some of its body. Raises ``FramingError``."""
        raise NotImplementedError

    def answer_continued(self, data: bytes) -> None:
        """More of the answer's body. Raises ``FramingError``."""
        raise NotImplementedError

    def replica_lost(self, connection: "ReplicaConnection", *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone. ``answered``: some bytes of an answer had come."""
        raise NotImplementedError

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        raise NotImplementedError
