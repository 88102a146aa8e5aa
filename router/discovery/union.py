"""One list of replicas from several sources. No I/O."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.replica_config import ReplicaConfig


class Union(NamedTuple):
    """All that can be together, and why others cannot."""

    replicas: tuple[ReplicaConfig, ...]
    refusals: tuple[str, ...]


def united(sources: Iterable[tuple[str, Sequence[ReplicaConfig]]]) -> Union:
    """Each name once: of two with one name, or one URL in two sources, the earlier stays.

    >>> a, b = ReplicaConfig(url="http://h:1", name="a"), ReplicaConfig(url="http://h:2", name="a")
    >>> united([("replicas", [a]), ("file x", [b])]).refusals
    ('file x: a (http://h:2): replicas has that name at http://h:1',)
    """
    kept: list[ReplicaConfig] = []
    refusals: list[str] = []
    names: dict[str, tuple[str, ReplicaConfig]] = {}
    urls: dict[str, tuple[str, ReplicaConfig]] = {}
    for label, replicas in sources:
        fit = []
        for one in replicas:
            name = one.effective_name
            who = f"{label}: {name} ({one.url})"
            if name in names:
                other, there = names[name]
                refusals.append(f"{who}: {other} has that name at {there.url}")
            elif one.url in urls and urls[one.url][0] != label:
                other, there = urls[one.url]
                refusals.append(f"{who}: {other} has that URL as {there.effective_name}")
            else:
                fit.append(one)
                names[name] = label, one
        kept += fit
        urls |= {one.url: (label, one) for one in fit}
    return Union(tuple(kept), tuple(refusals))
