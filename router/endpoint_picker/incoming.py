"""A request as Envoy sends it, until all of it is here that can be seen before the pick.

How depends on the gateway's ``request_body_mode``:

- ``BUFFERED``: the body comes whole, once the head was replied to; the pick is the reply to it.
- ``FULL_DUPLEX_STREAMED``: the body comes in pieces, nothing is replied to until it is complete, and then it
  goes back behind the pick.
- ``NONE`` and ``STREAMED``: the body comes too late or never; the pick is by the head alone.
"""

from router.endpoint_picker import messages
from router.endpoint_picker.destination import Destination
from router.endpoint_picker.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    NONE,
    STREAMED,
    HttpBody,
    ProcessingRequest,
)
from router.proxy.request_head import RequestHead


class Incoming:
    """One request. Replies are appended to ``out`` in the order in which Envoy wants them."""

    def __init__(self, out: list[bytes]) -> None:
        self._out = out
        self.head = RequestHead(b"", b"", False, {}, [])
        self.subset: frozenset[str] | None = None
        """The endpoints that alone may be picked, if the gateway says so."""
        self.answer_seen = True
        """The answer's body will be sent to us."""
        self.answer_echoed = True
        """It has to go back."""
        self.body_bytes = 0
        """So far."""
        self.begun = False
        """Its head is here."""
        self.complete = False
        """All is here."""
        self.unanswerable = False
        """The head was replied to, and trailers came in the place of a body: no reply is left to pick by."""
        self.body_hidden = False
        """There may be a body that is not seen in time."""
        self._mode = FULL_DUPLEX_STREAMED  # where a gateway does not say, as the protocol has it
        self._pieces: list[bytes] = []
        self._body_came = False
        self._trailers = False
        self._picked = False
        self._after: list[bytes] = []
        """Replies that follow the pick."""

    def begin(self, message: ProcessingRequest) -> None:
        """The head came."""
        self.begun = True
        self.head = messages.request_head(message.request_headers)
        self.subset = messages.subset_hint(message)
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            answer_mode = message.protocol_config.response_body_mode
            self.answer_seen, self.answer_echoed = answer_mode != NONE, answer_mode == FULL_DUPLEX_STREAMED
        if message.request_headers.end_of_stream:
            self._mode = NONE
        if self._mode in (NONE, STREAMED):
            self.complete = True
            self.body_hidden = not message.request_headers.end_of_stream
        elif self._mode != FULL_DUPLEX_STREAMED:
            self._out.append(messages.CONTINUE_REQUEST_HEADERS)

    def body_came(self, body: HttpBody) -> None:
        """A piece of the body, or all of it."""
        if self._mode in (NONE, STREAMED):
            self._reply(messages.CONTINUE_REQUEST_BODY)
            return
        if self.complete:
            return  # from 1.35 on Envoy may send the last piece of a long body twice (envoy issue 46237)
        self._body_came = True
        self._pieces.append(body.body)
        self.body_bytes += len(body.body)
        self.complete = body.end_of_stream or self._mode != FULL_DUPLEX_STREAMED

    def trailers_came(self) -> None:
        """The body is over, if there was one, and something follows it."""
        self._reply(messages.CONTINUE_REQUEST_TRAILERS)
        if self._mode == FULL_DUPLEX_STREAMED:
            self._trailers = self.complete = True
        elif not self.complete:
            self.unanswerable = True

    def _reply(self, reply: bytes) -> None:
        (self._out if self._picked else self._after).append(reply)

    def body(self) -> bytes:
        """The body as it came; empty where none was seen."""
        self._pieces[:] = (b"".join(self._pieces),)
        return self._pieces[0]

    def picked(self, to: Destination) -> None:
        """It goes there."""
        self._picked = True
        if self._mode == FULL_DUPLEX_STREAMED:
            self._out.append(messages.picked(to, in_body_phase=False))
            if self._body_came:
                self._out.extend(messages.streamed_request(to.body, last=not self._trailers))
        elif self._mode in (NONE, STREAMED):
            self._out.append(messages.picked(to, in_body_phase=False))
        else:
            changed = to.body != self.body()
            self._out.append(messages.picked(to, in_body_phase=True, body_changed=changed))
        self._out.extend(self._after)
        self._pieces.clear()
