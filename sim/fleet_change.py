"""What happens to a fleet while it serves: replicas die, come back, join and are drained."""

from dataclasses import dataclass
from typing import Literal, get_args

ChangeKind = Literal["fail", "restart", "join", "drain", "resume"]


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One event. ``fail``: the process dies with all it had, nobody listens there any more. ``restart``: it
    is back with an empty cache (alone: it dies and is back at once). ``join``: the replica was not there
    before. ``drain``: no new work. ``resume``: the end of that.

    >>> FleetChange.parse("600:fail:3")
    FleetChange(at_s=600.0, kind='fail', replica=3)
    """

    at_s: float
    kind: ChangeKind
    replica: int
    """Position in the fleet, from 0."""

    @classmethod
    def parse(cls, text: str) -> "FleetChange":
        """From ``SECONDS:KIND:REPLICA``. Raises ValueError that says what was expected."""
        parts = text.split(":")
        try:
            at_s, kind, replica = float(parts[0]), parts[1], int(parts[2])
            if len(parts) != 3 or kind not in get_args(ChangeKind) or replica < 0 or not 0 <= at_s < 1e12:
                raise ValueError
        except (ValueError, IndexError):
            raise ValueError(
                f"{text!r}; expected SECONDS:KIND:REPLICA with KIND one of {', '.join(get_args(ChangeKind))} "
                "and REPLICA counted from 0, such as 600:fail:3"
            ) from None
        return cls(at_s, kind, replica)  # type: ignore[arg-type]
