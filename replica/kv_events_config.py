"""The keys of ``kv_events:`` in a replica's YAML."""

from typing import Literal

from pydantic import PositiveInt, field_validator

from replica.config_values import Section
from replica.contract.kv_event_endpoint import checked_endpoint, is_wildcard


class KvEventsConfig(Section):
    """Where the KV events go (ZMQ). A plain ``tcp://*:5557`` stands for ``endpoint`` alone.

    As in vLLM, an endpoint with a wildcard host is listened on, and one with a concrete host is connected
    to: there a router listens.
    """

    endpoint: str
    """tcp://HOST:PORT or ipc:///path; port 0 takes a free one."""
    bind: bool | None = None
    """Listen on ``endpoint``; unless set, true for a wildcard host and for ipc."""
    replay: str | None = None
    """Listened on for those who ask for what they missed; without it what is lost is lost."""
    topic: str = ""
    """The first frame of every message."""
    form: Literal["map", "array"] = "map"
    """Events as vLLM 0.24 and later writes them, or as before."""
    hashes: Literal["int", "bytes"] = "int"
    """Block hashes as their last 64 bits, or whole."""
    buffer_batches: PositiveInt = 10_000
    """Batches kept for replay."""
    hwm: PositiveInt = 100_000
    """Messages that wait for one slow subscriber; more are dropped, and it has a gap."""

    @field_validator("endpoint", "replay")
    @classmethod
    def _transport(cls, value: str | None) -> str | None:
        return None if value is None else checked_endpoint(value)

    @property
    def binds(self) -> bool:
        """The replica listens, subscribers connect."""
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or is_wildcard(self.endpoint)
