"""What a policy sees: one request, and the replicas it may choose from."""

from collections.abc import Sequence
from typing import Final, Protocol, overload

from mypy_extensions import mypyc_attr

from router.routing.decision import Assessment, Decision
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState

ROUTE_KEY_TOKENS: Final = 1_024


class MatchedTokens(Sequence[int]):
    """Matched tokens by replica index, looked up in levels: for fleets too large for a list per request.

    No two levels have a replica in common.

    >>> matched = MatchedTokens([(0b0101, 100), (0b1000, 300)], replicas=4)
    >>> list(matched), matched.of(2), matched.longest
    ([100, 0, 100, 300], 100, 300)
    """

    __slots__ = ("_holders", "_replicas", "_tokens", "longest")

    def __init__(self, levels: Sequence[tuple[int, int]], replicas: int) -> None:
        self._holders = [mask.to_bytes((mask.bit_length() + 7) // 8, "little") for mask, _ in levels]
        """A bit for each replica; of bytes, since a long integer is shifted whole to look at one bit."""
        self._tokens = [tokens for _, tokens in levels]
        self._replicas = replicas
        self.longest = max(self._tokens) if levels else 0
        """The most that any replica holds."""

    def __len__(self) -> int:
        return self._replicas

    def of(self, index: int) -> int:
        """Of one replica. O(levels)."""
        place, bit = index >> 3, 1 << (index & 7)
        for level, holders in enumerate(self._holders):
            if place < len(holders) and holders[place] & bit:
                return self._tokens[level]
        return 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self.of(i) for i in range(*index.indices(self._replicas))]
        if not 0 <= index < self._replicas:
            raise IndexError(index)
        return self.of(index)


@mypyc_attr(acyclic=True, free_list_len=1)
class RoutingRequest:
    """One request as a policy sees it, with the fleet-wide figures the prices are made from."""

    __slots__ = (
        "_tokens_per_unit",
        "arrivals_per_replica_s",
        "copy_price",
        "decode_price",
        "expected_output_tokens",
        "fleet_utilization",
        "later_arrivals_per_s",
        "matched_tokens",
        "now",
        "prompt",
        "prompt_tokens",
        "session",
        "universal_tokens",
    )

    def __init__(
        self,
        now: float,
        prompt_tokens: int,
        matched_tokens: Sequence[int],
        session: str | None = None,
        prompt: Prompt | None = None,
        tokens_per_unit: float = 1.0,
        arrivals_per_replica_s: float = 0.0,
        fleet_utilization: float = 0.0,
        decode_price: float = 0.0,
        expected_output_tokens: float = 0.0,
        copy_price: float = 1.0,
        universal_tokens: int = 0,
    ) -> None:
        self.now = now
        self.prompt_tokens = prompt_tokens
        self.matched_tokens = matched_tokens
        """By replica index: prompt tokens the index believes are cached there."""
        self.session = session
        self.prompt = prompt
        self._tokens_per_unit = tokens_per_unit
        self.arrivals_per_replica_s = arrivals_per_replica_s
        self.fleet_utilization = fleet_utilization
        self.later_arrivals_per_s = arrivals_per_replica_s / (1.0 - fleet_utilization)
        """Requests a second that a busy period at one replica gathers: A / N / (1 - ρ)."""
        self.decode_price = decode_price
        """κ: what a second of decoding is worth in seconds of time to first token."""
        self.expected_output_tokens = expected_output_tokens
        self.copy_price = copy_price
        """Share of its price on others that computing a cached prefix once more counts; see ``heat.py``."""
        self.universal_tokens = universal_tokens
        """Leading tokens that most traffic shares, if a candidate lacks them (``universal_head.py``)."""

    def with_matched(self, matched_tokens: Sequence[int]) -> "RoutingRequest":
        """The same request where other tokens are cached."""
        return self._as(matched_tokens, self.expected_output_tokens)

    def with_reply(self, expected_output_tokens: float) -> "RoutingRequest":
        """The same request with a reply of another length."""
        return self._as(self.matched_tokens, expected_output_tokens)

    def _as(self, matched_tokens: Sequence[int], expected_output_tokens: float) -> "RoutingRequest":
        return RoutingRequest(
            self.now,
            self.prompt_tokens,
            matched_tokens,
            self.session,
            self.prompt,
            self._tokens_per_unit,
            self.arrivals_per_replica_s,
            self.fleet_utilization,
            self.decode_price,
            expected_output_tokens,
            self.copy_price,
            self.universal_tokens,
        )

    @property
    def route_key(self) -> int | None:
        """The block key about 1,024 tokens in, for policies that hash; ``None`` without a block."""
        prompt = self.prompt
        if prompt is None or not prompt.keys:
            return None
        depth = prompt.layout.blocks(int(ROUTE_KEY_TOKENS / self._tokens_per_unit)) or 1
        return prompt.keys[min(depth, len(prompt.keys)) - 1]


class Policy(Protocol):
    """Chooses one of several candidates. Never called with none; never awaits."""

    samples: bool
    """True: of a large fleet a few candidates will do (``shortlist.py``). False: it must see all."""

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The decision for ``request``. ``candidates`` are usable and not yet tried."""

    def copy(self) -> "Policy":
        """An independent one in the same state: what it chooses does not change what this one will."""

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """What each candidate would cost, in the candidates' order; chooses nothing."""
