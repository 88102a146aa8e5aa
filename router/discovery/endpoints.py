"""Where the ready replicas are, by the EndpointSlices or pods that the Kubernetes API shows. No I/O.

Not ready and terminating ones are left out: a replica that was in and is no longer gets no new request, and
what runs there finishes.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Endpoint(NamedTuple):
    """One ready replica."""

    name: str | None
    """Of its pod, where that is known."""
    host: str
    port: int


class PortUnknown(ValueError):
    """Which port is meant cannot be told: says why."""


def ready_in_slice(found: dict[str, Any], port: int | str | None) -> Iterator[Endpoint]:
    """The ready endpoints of one EndpointSlice. Raises ``PortUnknown``.

    >>> list(ready_in_slice({"ports": [{"name": "http", "port": 8000}], "endpoints": [
    ...     {"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "vllm-0"}},
    ...     {"addresses": ["10.0.0.2"], "conditions": {"ready": False}}]}, None))
    [Endpoint(name='vllm-0', host='10.0.0.1', port=8000)]
    """
    for one in found.get("endpoints") or ():
        conditions = one.get("conditions") or {}
        if conditions.get("ready") is False or conditions.get("terminating"):  # unset is ready
            continue
        target = one.get("targetRef") or {}
        number = _port(port, ((p.get("name"), p.get("port")) for p in found.get("ports") or ()))
        name = target.get("name") if target.get("kind") == "Pod" else None
        yield Endpoint(name, one["addresses"][0], number)


def ready_pod(found: dict[str, Any], port: int | str | None) -> Iterator[Endpoint]:
    """The pod, if it is ready. Raises ``PortUnknown``.

    >>> pod = {"metadata": {"name": "vllm-0"}, "spec": {"containers": [{"ports": [{"containerPort": 8000}]}]},
    ...     "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}}
    >>> list(ready_pod(pod, None))
    [Endpoint(name='vllm-0', host='10.0.0.1', port=8000)]
    """
    meta, status = found["metadata"], found.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    if conditions.get("Ready") != "True" or meta.get("deletionTimestamp") or not status.get("podIP"):
        return
    declared = (
        (one.get("name"), one.get("containerPort"))
        for container in found["spec"]["containers"]
        for one in container.get("ports") or ()
    )
    yield Endpoint(meta["name"], status["podIP"], _port(port, declared))


def _port(wanted: int | str | None, declared: Iterable[tuple[str | None, int | None]]) -> int:
    if isinstance(wanted, int):
        return wanted
    ports = {name: number for name, number in declared if number is not None}
    fit = [number for name, number in ports.items() if wanted is None or name == wanted]
    if len(fit) == 1:
        return fit[0]
    there = ", ".join(f"{name or '(no name)'} {number}" for name, number in ports.items()) or "none"
    raise PortUnknown(f"port: expected the name or number of one port, there are: {there}")


def distinct(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Each pod and each address once, sorted.

    A pod may be in several slices while it moves between them, and in one for each family of addresses.

    >>> distinct([Endpoint("a", "fd00::1", 1), Endpoint("a", "10.0.0.1", 1), Endpoint("a", "10.0.0.1", 1)])
    [Endpoint(name='a', host='10.0.0.1', port=1)]
    """
    by_pod: dict[object, Endpoint] = {}
    for one in sorted(set(endpoints), key=lambda one: (one.name or "", ":" in one.host, one.host, one.port)):
        by_pod.setdefault(one.name or (one.host, one.port), one)
    return list(by_pod.values())
