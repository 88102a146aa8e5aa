"""What a finished request teaches: reply lengths, decode steps, tokens per byte, hits that were no hits."""

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.in_flight import InFlight, Usage
from router.routing.traffic import Traffic


class UsageLessons:
    """Drawn from what the replica reports as the request's usage, and from how long it took."""

    __slots__ = ("_caches", "_learn_ratio", "_traffic")

    def __init__(self, caches: CacheBeliefs, traffic: Traffic, *, learn_ratio: bool) -> None:
        """``learn_ratio``: a prompt's length is counted in bytes, so tokens per byte is worth knowing."""
        self._caches = caches
        self._traffic = traffic
        self._learn_ratio = learn_ratio

    def replied(self, flight: InFlight, now: float, output_tokens: int, sequences: int) -> float:
        """A whole reply came; ``sequences`` decoded on its replica at the end. Seconds it was decoded for."""
        decoding_s = 0.0
        if flight.first_token_at is not None:
            # Prefills beside it stalled this stream for about their share of the time. Policies divide
            # a step by 1 - utilization, so what is learned must be the step without the stalls.
            decoding_s = (now - flight.first_token_at) * (1.0 - flight.replica.ledger.utilization(now))
        self._traffic.replied(output_tokens)
        flight.replica.replied(output_tokens, decoding_s, sequences)
        return decoding_s

    def prompt_counted(self, flight: InFlight, usage: Usage) -> bool:
        """The replica told how many tokens the prompt had, and how many of them were cached.

        True if that shows that the replica has lost its cache; it is then believed to hold this prompt only.
        """
        if usage.prompt_tokens is None:
            return False
        prompt = flight.prompt
        if self._learn_ratio and prompt.chains is None and prompt.tokens is None:
            self._caches.token_ratio.learn(usage.prompt_tokens, prompt.units)
        if usage.cached_tokens is None:
            return False
        replica, matched = flight.replica, flight.decision.matched_tokens
        replica.credit.answered(matched, usage.cached_tokens, usage.prompt_tokens)
        lost = replica.credit.cache_lost(
            matched, usage.prompt_tokens, usage.cached_tokens, settled=flight.settled
        )
        return lost and self._caches.cache_lost(replica.index, prompt)
