"""The answer that Envoy passes on, as its picker sees it: who gives it, the first token, usage, the end."""

from typing import TYPE_CHECKING

from router.proxy.answer import MARKED_PATHS
from router.proxy.booked import Booked
from router.proxy.router_error import REPLICA_BROKEN
from router.proxy.service import Service
from router.proxy.stream_watch import JsonWatch, StreamWatch
from router.proxy.typed_stream import stream_watch
from router.routing.in_flight import Usage
from router.routing.retry import Failure, failure_of_status, rest_s

if TYPE_CHECKING:
    from router.endpoint_picker.pick import Pick

WANTED = frozenset({b":status", b"content-type", b"content-encoding", b"retry-after"})


class ServedAnswer:
    """One answer from its head on. ``booked`` is settled when it is over."""

    def __init__(self, service: Service, pick: "Pick", booked: Booked, fields: dict[bytes, bytes]) -> None:
        """``fields``: the ``WANTED`` ones of its head."""
        self._service = service
        self._pick = pick
        self._booked = booked
        status = fields.get(b":status", b"")
        self.status = int(status) if status.isdigit() else 0
        self._watch: StreamWatch | JsonWatch | None = None
        self._ends_marked = False
        self.ttft_s: float | None = None
        """From the request's head to the first token of a stream."""
        self.usage: Usage | None = None
        """What the replica reported."""
        now = service.clock()
        service.counters.first_byte_s.add(now - pick.head_at)
        if self.status >= 400:
            failure = failure_of_status(self.status, retry_after=b"retry-after" in fields)
            if failure is None:
                booked.refused(now)
            else:
                booked.failed(now, failure, rest_s(fields.get(b"retry-after")))
        elif fields.get(b"content-encoding", b"identity") == b"identity":
            stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
            self._watch = stream_watch(pick.head.path) if stream else JsonWatch()
            self._ends_marked = stream and pick.head.path in MARKED_PATHS

    def continued(self, body: bytes) -> None:
        """More of its body."""
        watch, booked = self._watch, self._booked
        now = self._service.clock()
        booked.progressed(now)
        if watch is None or not body:
            return
        watch.pieces.append(body)
        watch.grew(len(body))
        if watch.first_token and self.ttft_s is None and self._pick.prompt.stream:
            self.ttft_s = now - self._pick.head_at
            self._service.counters.ttft_s.add(self.ttft_s)
            if self._pick.row is not None:
                self._pick.row.ttft_s = self.ttft_s
            if self._pick.admission is not None:
                self._pick.admission.first_token(self.ttft_s)
            booked.first_token(now)

    def complete(self) -> None:
        """Its last byte went by."""
        service, pick, booked, watch = self._service, self._pick, self._booked, self._watch
        now = service.clock()
        if self._ends_marked and isinstance(watch, StreamWatch) and not watch.ended_properly:
            service.counters.broken_streams += 1
            service.failures.log(
                "answer to %s broke off on replica %s: its stream ended without a mark of its end",
                pick.request_id.decode(),
                booked.name,
            )
            booked.failed(now, Failure.BROKEN)
            pick.error_code = REPLICA_BROKEN.code
            return
        if not booked.booked:
            return
        usage = self.usage = None if watch is None else watch.usage()
        pick.answered(booked, usage, self.ttft_s, now)
        service.send_released(now)
