"""One request within its tenant's limits: what it takes of them is given back once, whatever happens."""

from router.proxy.tenancy import Caller
from router.routing.in_flight import Usage

CLIENT_LEFT = 499
"""The status that is counted where the client left before its answer was complete."""


class Admission:
    """Owned by the request's exchange, which calls ``ended`` once."""

    __slots__ = ("_charged", "_held", "caller")

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._charged: tuple[int, int] | None = None
        """Tokens of prompt and reply; ``None``: it was not let in."""
        self._held = False

    def began(self, prompt_tokens: int, reply_tokens: int, now: float) -> None:
        """It was let in. ``reply_tokens``: as many as are expected."""
        self._charged = prompt_tokens, reply_tokens
        self.caller.quota.began(prompt_tokens + reply_tokens, now)

    def held(self, on: bool) -> None:
        """It waits in the router, or does no longer."""
        if on is not self._held:
            self._held = on
            self.caller.quota.held += 1 if on else -1

    def first_token(self, ttft_s: float) -> None:
        """The first token of a streamed answer came."""
        self.caller.counters.add_ttft(ttft_s)

    def used(self, usage: Usage, now: float) -> None:
        """The whole answer told its tokens: what was expected is made good."""
        charged = self._charged
        if charged is not None:
            prompt = charged[0] if usage.prompt_tokens is None else usage.prompt_tokens
            reply = charged[1] if usage.output_tokens is None else usage.output_tokens
            self.caller.quota.corrected(prompt + reply - sum(charged), now)
            self._charged = prompt, reply
        self.caller.counters.add_usage(usage)

    def ended(self, status: int, now: float, *, answered: bool) -> None:
        """It is over. Without an answer nothing was used, unless the client did not wait for it."""
        caller, charged = self.caller, self._charged
        self.held(False)
        if charged is not None:
            if not answered and status != CLIENT_LEFT:
                caller.quota.corrected(-sum(charged), now)
            caller.quota.ended()
        caller.counters.count(status)
