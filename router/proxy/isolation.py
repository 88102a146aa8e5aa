"""Which replicas a tenant's request may go to: those whose engine keeps tenants' prompts apart at its path.

Where an engine reads no cache salt, what one tenant's prompt has left in its prefix cache is hit by the
others', and the time of their first token tells them so.
"""

from collections.abc import Collection, Iterator
from typing import Final

from router.engines import ENGINES
from router.proxy.path_rules import plain_path
from router.routing.roster import Roster

PATHS_REMEMBERED: Final = 256
_SHARING_EVERYWHERE = frozenset(kind for kind, engine in ENGINES.items() if not engine.parts_cache)
_SHARING_SOMEWHERE = _SHARING_EVERYWHERE | {kind for kind, engine in ENGINES.items() if engine.unparted_paths}


def sharing_engines(path: bytes) -> frozenset[str | None]:
    """The engines in which tenants share what is cached of requests to ``path``.

    ``None`` is one that is not known yet: it may be any of these.

    >>> chats = sharing_engines(b"/v1/completions")
    >>> chats == {"llamacpp", "openai", "tgi", None}
    True
    >>> sharing_engines(b"/v1//Embeddings/") - chats
    frozenset({'sglang'})
    """
    plain = plain_path(path)
    if plain is None or b"." in plain.split(b"/") or b".." in plain.split(b"/"):
        return frozenset((*_SHARING_SOMEWHERE, None))  # where it leads is the replica's guess
    asked = plain.decode("utf-8", "replace").lower()
    sharing = [kind for kind, engine in ENGINES.items() if asked in engine.unparted_paths]
    return frozenset((*_SHARING_EVERYWHERE, *sharing, None))


class Isolation:
    """Made where several tenants may meet and ``tenants.isolation`` is strict."""

    __slots__ = ("_replicas", "_sharing")

    def __init__(self, replicas: Roster) -> None:
        self._replicas = replicas
        self._sharing: dict[bytes, frozenset[str | None]] = {}

    def within(self, path: bytes, asked: Collection[int] | None) -> Collection[int] | None:
        """Which of the ``asked`` replicas may get a request to ``path``, by index; ``None``: any.

        What comes back is ``asked`` itself if all replicas may. Cost: O(1), then O(replicas) a decision if
        not all may.
        """
        sharing = self._sharing.get(path)
        if sharing is None:
            if len(self._sharing) >= PATHS_REMEMBERED:
                self._sharing.clear()
            sharing = self._sharing[path] = sharing_engines(path)
        if sharing.isdisjoint(self._replicas.engines):
            return asked
        return Apart(self._replicas, sharing, asked)


class Apart(Collection[int]):
    """Replicas that keep tenants apart, as the fleet is when it is looked at: who joined while a request
    waited, or turned out to be another engine, is seen for what it is."""

    __slots__ = ("_asked", "_replicas", "_sharing")

    def __init__(
        self, replicas: Roster, sharing: frozenset[str | None], asked: Collection[int] | None
    ) -> None:
        self._replicas = replicas
        self._sharing = sharing
        self._asked = asked

    def __contains__(self, index: object) -> bool:
        asked, replica = self._asked, self._replicas.by_index.get(index)  # type: ignore[call-overload]
        if replica is None or replica.engine in self._sharing:
            return False
        return asked is None or index in asked

    def __iter__(self) -> Iterator[int]:
        return (index for index in self._replicas.by_index if index in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def sharing_serve(self, model: str | None) -> bool:
        """Those that serve ``model`` are all known to be none of these: waiting will not help."""
        asked = self._asked
        engines = [
            replica.engine
            for replica in self._replicas.staying
            if (asked is None or replica.index in asked) and (model is None or replica.may_serve(model))
        ]
        return bool(engines) and all(one is not None and one in self._sharing for one in engines)
