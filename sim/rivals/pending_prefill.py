"""Uncached prompt tokens sent to each replica and not yet at their first token."""

from router.routing.in_flight import InFlight


class PendingPrefill:
    """A counter by replica; a request counts from dispatch to its first token or its end."""

    __slots__ = ("_tokens", "_waiting")

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._waiting: dict[InFlight, int] = {}

    def tokens(self, replica: int) -> int:
        """Pending on ``replica``."""
        return self._tokens.get(replica, 0)

    def sent(self, flight: InFlight) -> None:
        """Its uncached tokens are on their way."""
        tokens = flight.booking.new_tokens
        self._waiting[flight] = tokens
        self._tokens[flight.replica.index] = self.tokens(flight.replica.index) + tokens

    def done(self, flight: InFlight) -> None:
        """First token or end, whichever comes first; nothing afterwards."""
        tokens = self._waiting.pop(flight, None)
        if tokens is not None:
            self._tokens[flight.replica.index] -= tokens
