"""The first of two steps: a prefill replica computes the prompt, another then pulls its KV and answers.

Owned by its exchange, like ``Tries``. The client sees nothing of it: what fails here is tried on another
prefill replica, and else computed by whoever answers. However it ends, its booking is given back once, by its
attempts.
"""

from typing import TYPE_CHECKING, Final

from router.proxy.answer import Answer
from router.proxy.asker import Asker
from router.proxy.attempt import Attempt
from router.proxy.body_framing import FramingError
from router.proxy.prefill_request import prefill_body, transfer_params
from router.proxy.recent import RecentDecision
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.replica_pool import ReplicaPool
from router.proxy.response_head import ResponseHead
from router.proxy.service import Service
from router.routing.decision import NoReplica
from router.routing.in_flight import InFlight, Usage
from router.routing.kv_route import KvPull
from router.routing.replica_state import ReplicaState
from router.routing.retry import RETRYABLE, Failure, failure_of_status, rest_s

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

MOST_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""One token and where its KV lies is less."""


class PrefillStep(Asker):
    """One request's. Ends in ``Exchange.step_over``, or by ``cancel``."""

    __slots__ = (
        "_answer",
        "_came",
        "_came_bytes",
        "_exchange",
        "_row",
        "_service",
        "attempt",
        "replica",
        "tried",
    )

    def __init__(self, service: Service, exchange: "Exchange", flight: InFlight, now: float) -> None:
        """``flight``: the fleet's booking; ``begin`` sends it."""
        super().__init__(exchange.settings)
        self._service = service
        self._exchange = exchange
        self._answer: Answer | None = None
        self._came: list[bytes] = []
        self._came_bytes = 0
        self.replica: ReplicaState = flight.replica
        """Who computes."""
        self.attempt = Attempt(service, self, flight, now)
        self._row = self._decided(now)
        self.tried: tuple[int, ...] = (flight.replica.index,)

    def _decided(self, now: float) -> RecentDecision:
        attempt, exchange = self.attempt, self._exchange
        return self._service.recent.decided(
            now, exchange.request_id, attempt.name, attempt.decision, exchange.prompt
        )

    def begin(self, now: float) -> None:
        """Send it where the fleet has booked it."""
        attempt = self.attempt
        self._service.counters.decided(attempt.name, attempt.decision.reason)
        attempt.send(now)

    def cancel(self, now: float) -> None:
        """Nobody wants it any more: the replica is to stop."""
        self.attempt.cancelled(now)

    def overdue(self, now: float) -> bool:
        """Look at the limits. True if one was passed."""
        attempt, settings = self.attempt, self.settings
        waited_s = now - attempt.sent_at
        if not attempt.waits_for_answer:
            if waited_s <= settings.connect_s:
                return False
            self._failed(Failure.CONNECT, "connect time-out")
        elif attempt.unreachable:
            self._failed(Failure.SILENT, "it answers nobody")
        elif waited_s > settings.first_byte_s:
            self._failed(Failure.FIRST_BYTE_TIMEOUT, "time-out")
        else:
            attempt.still_waits(now)
            return False
        return True

    # --- what the replica does -------------------------------------------------------------------

    def request(self, pool: ReplicaPool) -> tuple[bytes, bytes]:
        """The client's head, with a body that asks for one token."""
        exchange = self._exchange
        body = prefill_body(exchange.body_for(pool), kv_params=self.replica.spec.kv_pull is KvPull.VLLM)
        return exchange.message(pool, body)

    def connect_failed(self, why: str, *, own: bool) -> None:
        """The attempt could make no connection. ``own``: because this process had no socket for it."""
        self._failed(Failure.NO_SOCKET if own else Failure.CONNECT, why)

    def answer_began(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int
    ) -> None:
        """An answer's head is here. Raises ``FramingError``."""
        if head.status >= 400:
            self._turned_away(head)
            return
        request = self._exchange.head
        # As for HTTP/1.0, so that bodies come without their chunks.
        answer = self._answer = Answer(head, method=request.method, path=request.path, http10=True)
        whole = answer.take_whole(data, start)
        self._came.append(answer.take(data, start) if whole is None else whole)
        self._look(answer)

    def answer_continued(self, data: bytes) -> None:
        """More of the answer's body. Raises ``FramingError``."""
        answer = self._answer
        if answer is not None:
            self._came.append(answer.take(data))
            self._look(answer)

    def replica_lost(self, connection: ReplicaConnection, *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone."""
        attempt, answer = self.attempt, self._answer
        if connection is not attempt.connection:
            return
        if answer is not None and answer.until_close and clean:
            answer.closed()
            self._look(answer)
        elif connection.reused and not answered:
            attempt.send_again()  # it never saw the request
        else:
            self._failed(Failure.CLOSED, "closed" if clean else "reset")

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        self._failed(Failure.GARBAGE, "not HTTP")

    # --- ends ------------------------------------------------------------------------------------

    def _look(self, answer: Answer) -> None:
        self._came_bytes += len(self._came[-1])
        if self._came_bytes > MOST_ANSWER_BYTES:
            raise FramingError("an answer of one token is not that long")
        if not answer.done:
            return
        now, attempt = self._service.clock(), self.attempt
        usage = answer.usage()
        if usage is not None:  # of the reply's length its one token says nothing
            usage = Usage(usage.prompt_tokens, None, usage.cached_tokens)
        attempt.finished(now, usage)
        self._row.status = answer.status
        attempt.give_back(now, reusable=answer.reusable and not self._service.shutting_down)
        params = None
        if self.replica.spec.kv_pull is KvPull.VLLM:
            params = transfer_params(b"".join(self._came))
            if params is None:
                self._given_up(now)
                return
        self._computed(params or b"", now)

    def _turned_away(self, head: ResponseHead) -> None:
        """An error answer. If the request is at fault, the client is told so by the replica that answers."""
        attempt, now = self.attempt, self._service.clock()
        failure = failure_of_status(head.status, retry_after=head.retry_after is not None)
        if failure is not None:
            self._failed(failure, f"status {head.status}", rest_s(head.retry_after))
            return
        attempt.refused(now)
        attempt.drop()
        self._given_up(now)

    def _failed(self, failure: Failure, why: str, rest_s: float = 0.0) -> None:
        service, exchange, attempt = self._service, self._exchange, self.attempt
        now = service.clock()
        attempt.drop()
        attempt.failed(now, failure, rest_s)
        service.failures.log(
            "prefill of %s failed on replica %s after %d attempt(s): %s",
            exchange.request_id.decode(),
            attempt.name,
            len(self.tried),
            why,
        )
        self._answer = None
        self._came.clear()
        self._came_bytes = 0
        if failure in RETRYABLE and len(self.tried) < self.settings.attempts:
            try:
                decision = service.fleet.decide_prefill(
                    exchange.prompt,
                    now,
                    tried=self.tried,
                    policy=exchange.head.policy,
                    within=exchange.within,
                )
            except NoReplica:
                pass
            else:
                if service.budget.take(failure, len(self.tried)):
                    service.counters.retries += 1
                    flight = service.fleet.sent(exchange.prompt, decision, now)
                    self.tried = (*self.tried, decision.replica)
                    self.replica = flight.replica
                    self.attempt = Attempt(service, self, flight, now)
                    self._row.retried = True
                    self._row = self._decided(now)
                    self.begin(now)
                    return
        self._given_up(now)

    def _computed(self, kv_params: bytes, now: float) -> None:
        """The replica holds the prompt's KV: choose who answers."""
        self._service.counters.handoffs += 1
        self._over(self.replica, kv_params, now)

    def _given_up(self, now: float) -> None:
        """No prefill replica computed the prompt: whoever answers does."""
        self._service.counters.failed_handoffs += 1
        self._over(None, b"", now)

    def _over(self, source: ReplicaState | None, kv_params: bytes, now: float) -> None:
        fleet, exchange = self._service.fleet, self._exchange
        prompt, head = exchange.prompt, exchange.head
        answerer: InFlight | None = None
        try:
            if source is None:
                decision = exchange.decide_again(now, self.tried)
            else:
                decision = fleet.decide_answerer(
                    prompt, now, source, session=head.session, policy=head.policy, within=exchange.within
                )
            answerer = fleet.sent(prompt, decision, now)
        except NoReplica:
            pass
        exchange.step_over(answerer, kv_params, now)
        self._service.send_released(now)
