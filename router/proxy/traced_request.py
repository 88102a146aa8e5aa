"""What a request's span says once the request is over, however it came in."""

from dataclasses import dataclass
from typing import Protocol

from router.proxy.admission import Admission
from router.routing.decision import Decision
from router.routing.in_flight import Usage
from router.routing.prompt_blocks import Prompt

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Sent:
    """Where a request went, at last."""

    replica: str
    """Name."""
    decision: Decision
    held_s: float
    """From when the request was complete to its first pick."""
    tries: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request that is over."""

    status: int
    """What the client got; 499: it left."""
    request_id: bytes
    model: str | None
    error_code: str
    """Of the router's own error; empty if there is none."""
    tenant: str | None
    sent: Sent | None
    """``None``: to no replica."""
    ttft_s: float | None
    usage: Usage | None

    @property
    def failed(self) -> bool:
        """The span is an error's."""
        return self.status >= 500 or bool(self.error_code)

    def attributes(self) -> dict[str, Value]:
        """Names of OpenTelemetry's conventions where there are some, ``warmroute.*`` else. Milliseconds."""
        found: dict[str, Value | None] = {
            "http.response.status_code": self.status,
            "error.type": self.error_code or None,
            "gen_ai.request.model": self.model,
            "warmroute.request_id": self.request_id.decode("ascii", "replace"),
            "warmroute.tenant": self.tenant,
            "warmroute.ttft_ms": _ms(self.ttft_s),
        }
        if self.sent is not None:
            decision = self.sent.decision
            found |= {
                "warmroute.replica": self.sent.replica,
                "warmroute.reason": decision.reason.value,
                "warmroute.matched_tokens": decision.matched_tokens,
                "warmroute.wait_ms": 1e3 * decision.wait_s,
                "warmroute.prefill_ms": 1e3 * decision.prefill_s,
                "warmroute.saved_ms": 1e3 * decision.saved_s,
                "warmroute.spill_saved_ms": _ms(decision.spill_saved_s),
                "warmroute.extra_wait_ms": _ms(decision.extra_wait_s),
                "warmroute.held_ms": 1e3 * self.sent.held_s,
                "warmroute.tries": self.sent.tries,
                "warmroute.kv_step": None if decision.route is None else decision.route.step.value,
            }
        if self.usage is not None:
            found["gen_ai.usage.input_tokens"] = self.usage.prompt_tokens
            found["gen_ai.usage.output_tokens"] = self.usage.output_tokens
            found["warmroute.cached_tokens"] = self.usage.cached_tokens
        return {name: value for name, value in found.items() if value is not None}


class Followed(Protocol):
    """A request on its way, however it came in."""

    request_id: bytes
    prompt: Prompt
    error_code: str
    admission: Admission | None


class Answered(Protocol):
    """What was seen of an answer."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, if one came."""

    @property
    def usage(self) -> Usage | None:
        """What the replica told of its tokens."""


def traced(request: Followed, status: int, sent: Sent | None, answer: Answered | None) -> TracedRequest:
    """``request`` is over; the client got ``status``."""
    admission = request.admission
    return TracedRequest(
        status=status,
        request_id=request.request_id,
        model=request.prompt.model,
        error_code=request.error_code,
        tenant=None if admission is None else admission.caller.tenant.name,
        sent=sent,
        ttft_s=None if answer is None else answer.ttft_s,
        usage=None if answer is None else answer.usage,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
