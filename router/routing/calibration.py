"""Learns what work costs on one replica from what it did: prefill with its quadratic part, decode by batch.

The prior is the operator's figures, what model and GPU suggest (``cost_prior``), or a default.
"""

from typing import Final, NamedTuple

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.cost_shape import FORGET_PER_OBSERVATION, MOST_PART, CostShape
from router.routing.ledger import Speed

DEFAULT_PREFILL = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6, attention_tokens=64_000.0)
DEFAULT_DECODE = DecodeCost(fixed_s=0.008, per_sequence_s=60e-6)
OWN_AFTER_OBSERVATIONS: Final = 5
FADE_S: Final = 60.0
"""A replica that shows nothing for so long has half as many observations to its name."""
FADE_FROM: Final = 4 * OWN_AFTER_OBSERVATIONS
LEARN_ALWAYS: Final = 32
LEARN_EVERY: Final = 4
"""From ``LEARN_ALWAYS`` observations on lessons are drawn from four at a time: learning costs time, too."""
FORGET_PER_LESSON: Final = FORGET_PER_OBSERVATION**LEARN_EVERY
DECODE_LESSON_WEIGHT: Final = 0.08
PRIOR_OBSERVATIONS_S: Final = 0.05
SLOWEST: Final = 10_000.0
FASTEST: Final = 0.000_1
ERROR_WEIGHT: Final = 0.05
MOST_ERROR: Final = 10.0


class Learned(NamedTuple):
    """What was learned, to be taken up again by another router or after a restart."""

    busy_s: float
    predicted_s: float
    """By the prior, for what was done in ``busy_s``."""
    prefills: int
    decode_factor: float
    decodes: int
    prior_s: float
    """What the prior says of 1,000 tokens: what was learned over one says nothing over another."""
    attention_part: float = 1.0
    batch_part: float = 1.0
    """Of attention in a prefill, of sequences in a decode step: times what the prior has (``cost_shape``)."""

    def fits(self, prior_s: float) -> bool:
        """It can be what was learned, over this prior."""
        return (
            0.99 * prior_s < self.prior_s < 1.01 * prior_s
            and 0.0 < self.busy_s < float("inf")
            and 0.0 < self.predicted_s < float("inf")
            and FASTEST <= self.decode_factor <= SLOWEST
            and 1.0 / MOST_PART <= self.attention_part <= MOST_PART
            and 1.0 / MOST_PART <= self.batch_part <= MOST_PART
            and self.prefills >= 0
            and self.decodes >= 0
        )


class CostFit(NamedTuple):
    """What work costs on one replica as it is predicted now, and how far off predictions were lately."""

    prefill_fixed_s: float
    prefill_per_token_s: float
    attention_tokens: float
    """Where attention doubles what a token costs (``PrefillCost``)."""
    step_fixed_s: float
    step_per_sequence_s: float
    prefill_error: float
    """Mean of ``|seen / predicted - 1|`` over about the last 20 lessons, each before it was learned from."""
    step_error: float
    """The same of decode steps."""


class FleetSpeed:
    """What the replicas have in common: the factors one is taken to have until it shows its own."""

    __slots__ = (
        "_busy_s",
        "_members",
        "_next_news",
        "_predicted_s",
        "_seen",
        "attention",
        "attention_part",
        "batch",
        "batch_part",
        "blind",
        "decode_factor",
        "prefill_factor",
    )

    def __init__(self) -> None:
        self._members: list[ReplicaCost] = []
        self.blind = False
        """Other routers send work that is not told of: how long a prefill takes says nothing meanwhile."""
        self.attention, self.batch = CostShape(), CostShape()
        self.forget()

    def forget(self) -> None:
        """The priors changed: factors learned over the old ones mean nothing."""
        self.prefill_factor = 1.0
        self.decode_factor = 1.0
        self.attention_part = self.batch_part = 1.0
        self.attention.forget()
        self.batch.forget()
        self._busy_s = self._predicted_s = PRIOR_OBSERVATIONS_S
        self._seen = 0
        self._next_news = 1

    def join(self, cost: "ReplicaCost") -> None:
        """``cost`` follows the fleet from now on."""
        self._members.append(cost)

    def leave(self, cost: "ReplicaCost") -> None:
        """``cost`` follows no longer."""
        self._members.remove(cost)

    @property
    def learned(self) -> Learned:
        """To be taken up again."""
        return Learned(
            self._busy_s,
            self._predicted_s,
            self._seen,
            self.decode_factor,
            self._seen,
            self._prior_s,
            self.attention_part,
            self.batch_part,
        )

    @property
    def _prior_s(self) -> float:
        return sum(member.prior_s for member in self._members) / (len(self._members) or 1)

    def resumed(self, learned: Learned) -> None:
        """Take up what was learned elsewhere, if that was more."""
        if learned.fits(self._prior_s) and learned.prefills > self._seen:
            self._busy_s, self._predicted_s, self._seen = (
                learned.busy_s,
                learned.predicted_s,
                learned.prefills,
            )
            self._next_news = self._seen
            self.prefill_factor = _bounded(self._busy_s / self._predicted_s)
            self.decode_factor = learned.decode_factor
            self.attention.believed = self.attention_part = learned.attention_part
            self.batch.believed = self.batch_part = learned.batch_part
            self._tell()

    def prefilled(self, busy_s: float, predicted_s: float, attention_s: float) -> None:
        """Some replica was busy for ``busy_s`` with what the prior puts at ``predicted_s``, attention too."""
        self.attention.learn(busy_s, predicted_s - attention_s, attention_s)
        self.attention_part = self.attention.part(1.0)
        self._busy_s = self._busy_s * FORGET_PER_OBSERVATION + busy_s
        self._predicted_s = self._predicted_s * FORGET_PER_OBSERVATION + predicted_s
        self.prefill_factor = _bounded(self._busy_s / self._predicted_s)
        self._tell()

    def decoded(self, ratio: float, step_s: float, fixed_s: float) -> None:
        """A replica's decode steps took ``step_s``, ``ratio`` times the prior's with its ``fixed_s``."""
        prior_s = step_s / ratio
        self.batch.learn(step_s, fixed_s, prior_s - fixed_s)
        self.batch_part = self.batch.part(1.0)
        self.decode_factor += max(DECODE_LESSON_WEIGHT, 1.0 / (self._seen + 2)) * (ratio - self.decode_factor)
        self._tell()

    def _tell(self) -> None:
        """Members are told at once while little is known, then every so often: telling costs O(replicas)."""
        self._seen += 1
        if self._seen >= self._next_news:
            self._next_news = self._seen + min(self._seen // 4 + 1, len(self._members))
            for member in self._members:
                member.refresh()


class ReplicaCost(Speed):
    """A prior, two learned factors (how much slower or faster than the prior this replica is), two shapes.

    Prefill: while at least one request waits for its first token the replica is prefilling, so the
    seconds it was busy, over the seconds the prior predicts for what it finished meanwhile, is its speed.
    Both sums forget with a half-life of about 35 requests. A replica that has shown little is taken to be
    like the rest of the fleet: its own factor counts ``n² / (n² + 25)`` after n requests. Without that, a
    replica never used would look faster than all others whenever the prior is too fast. How much of a prefill
    is attention, and of a step its batch, is learned as in ``cost_shape``, around what the fleet shows.

    >>> cost = ReplicaCost(FleetSpeed(), PrefillCost(0.0, 100e-6), DecodeCost(0.01, 0.0))
    >>> for k in range(200):                          # a replica twice as slow as the prior, one at a time
    ...     cost.prefill_started(now=k * 1.0)
    ...     cost.prefill_finished(now=k * 1.0 + 0.2016, new_tokens=1_000, position=0, still_queued=0)
    >>> round(cost.prefill_s(1_000, 0), 2)
    0.2
    """

    __slots__ = (
        "_attention",
        "_attention_s",
        "_batch",
        "_busy_s",
        "_busy_since",
        "_decode",
        "_fixed_s",
        "_fleet",
        "_lesson_at",
        "_new_attention_s",
        "_new_busy_s",
        "_new_fitted_s",
        "_new_predicted_s",
        "_own_decode_factor",
        "_own_decode_share",
        "_own_prefill_factor",
        "_own_prefill_share",
        "_per_sequence_s",
        "_per_token_s",
        "_predicted_s",
        "_prefill",
        "_prefill_error",
        "_step_error",
        "_step_s",
        "decode_factor",
        "prefills_seen",
        "steps_seen",
    )

    def __init__(
        self,
        fleet: FleetSpeed,
        prefill: PrefillCost = DEFAULT_PREFILL,
        decode: DecodeCost = DEFAULT_DECODE,
    ) -> None:
        super().__init__()
        self._fleet = fleet
        self._busy_since: float | None = None
        self._lesson_at = 0.0
        self._attention, self._batch = CostShape(), CostShape()
        self._begin(prefill, decode)
        fleet.join(self)

    def prior_given(self, prefill: PrefillCost, decode: DecodeCost) -> None:
        """What work is taken to cost here; if that is new, speeds are learned anew, also what all have in
        common if this replica had a part in it."""
        if (prefill, decode) != (self._prefill, self._decode):
            if self.prefills_seen or self.steps_seen:
                self._fleet.forget()
            self._begin(prefill, decode)

    def _begin(self, prefill: PrefillCost, decode: DecodeCost) -> None:
        self._prefill = prefill
        self._decode = decode
        self._own_prefill_factor = self._own_decode_factor = 1.0
        self._own_prefill_share = self._own_decode_share = 0.0
        self._busy_s = self._predicted_s = 0.0
        self._new_busy_s = self._new_predicted_s = self._new_attention_s = self._new_fitted_s = 0.0
        self._attention.forget()
        self._batch.forget()
        self._prefill_error = self._step_error = 0.0
        self.prefills_seen = 0
        self.steps_seen = 0
        self.prefill_factor = self.decode_factor = 1.0
        self.refresh()

    def prefill_s(self, new_tokens: int, position: int) -> float:
        """Seconds to prefill ``new_tokens`` after ``position`` cached tokens on this replica."""
        return self._fixed_s + new_tokens * (
            self._per_token_s + self._attention_s * (position + 0.5 * new_tokens)
        )

    def step_s(self, sequences: int) -> float:
        """Seconds of one decode step with ``sequences`` requests on this replica."""
        return self._step_s + self._per_sequence_s * sequences

    def refresh(self) -> None:
        """Work the factors into the coefficients that every decision reads."""
        fleet = self._fleet
        self.prefill_factor = factor = fleet.prefill_factor + self._own_prefill_share * (
            self._own_prefill_factor - fleet.prefill_factor
        )
        part = self._attention.part(fleet.attention_part)
        level = self._attention.level(factor, part, fleet.attention)
        self._fixed_s = level * self._prefill.fixed_s
        self._per_token_s = level * self._prefill.per_token_s
        self._attention_s = part * self._per_token_s / self._prefill.attention_tokens
        self.decode_factor = factor = fleet.decode_factor + self._own_decode_share * (
            self._own_decode_factor - fleet.decode_factor
        )
        part = self._batch.part(fleet.batch_part)
        level = self._batch.level(factor, part, fleet.batch)
        self._step_s = level * self._decode.fixed_s
        self._per_sequence_s = level * part * self._decode.per_sequence_s

    @property
    def fit(self) -> CostFit:
        """For reports."""
        return CostFit(
            self._fixed_s,
            self._per_token_s,
            self._per_token_s / self._attention_s,
            self._step_s,
            self._per_sequence_s,
            self._prefill_error,
            self._step_error,
        )

    @property
    def learned(self) -> Learned:
        """To be taken up again."""
        return Learned(
            self._busy_s,
            self._predicted_s,
            self.prefills_seen,
            self._own_decode_factor,
            self.steps_seen,
            self.prior_s,
            self._attention.part(self._fleet.attention_part),
            self._batch.part(self._fleet.batch_part),
        )

    @property
    def prior_s(self) -> float:
        """What the prior says of 1,000 tokens."""
        return self._prefill.seconds(1_000, 0)

    def resumed(self, learned: Learned) -> None:
        """Take up what was learned elsewhere, if that was more."""
        if not learned.fits(self.prior_s) or learned.prefills <= self.prefills_seen:
            return
        self._busy_s, self._predicted_s = learned.busy_s, learned.predicted_s
        self.prefills_seen, self.steps_seen = learned.prefills, learned.decodes
        self._own_prefill_factor = _bounded(self._busy_s / self._predicted_s)
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._own_decode_factor = learned.decode_factor
        self._own_decode_share = _own_share(self.steps_seen)
        self._attention.believed = learned.attention_part
        self._batch.believed = learned.batch_part
        self.refresh()

    def prefill_started(self, now: float) -> None:
        """A request was sent; the replica is busy from here if it was not."""
        if self._busy_since is None:
            self._busy_since = now

    def prefill_finished(self, now: float, new_tokens: int, position: int, still_queued: int) -> None:
        """A first token was seen ``now``; ``still_queued`` requests still wait for theirs."""
        since = self._busy_since
        if since is None:
            return
        self._busy_since = now if still_queued else None
        if self._fleet.blind:
            return
        self._new_busy_s += now - since
        prior = self._prefill
        self._new_predicted_s += prior.seconds(new_tokens, position)
        self._new_attention_s += (
            prior.per_token_s * new_tokens * (position + 0.5 * new_tokens) / prior.attention_tokens
        )
        self._new_fitted_s += self.prefill_s(new_tokens, position)
        self.prefills_seen += 1
        self._lesson_at = now
        if self.prefills_seen < LEARN_ALWAYS or not self.prefills_seen % LEARN_EVERY:
            self._learn_prefill()

    def fade(self, now: float) -> None:
        """Believe less of what the replica showed the longer ago that was: it becomes like the others.

        One that was slow for a moment would else look slow for ever where the others can do all the work.
        Called often.
        """
        if now - self._lesson_at < FADE_S or not self.prefills_seen:
            return
        self._lesson_at = now
        self.prefills_seen = min(self.prefills_seen, FADE_FROM) // 2
        self.steps_seen = min(self.steps_seen, FADE_FROM) // 2
        self._busy_s /= 2.0
        self._predicted_s /= 2.0
        self._attention.fade()
        self._batch.fade()
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._own_decode_share = _own_share(self.steps_seen)
        self.refresh()

    def _learn_prefill(self) -> None:
        busy, predicted, attention = self._new_busy_s, self._new_predicted_s, self._new_attention_s
        self._prefill_error += _error_weight(self.prefills_seen) * (
            _error(busy, self._new_fitted_s) - self._prefill_error
        )
        self._new_busy_s = self._new_predicted_s = self._new_attention_s = self._new_fitted_s = 0.0
        keep = FORGET_PER_OBSERVATION if self.prefills_seen < LEARN_ALWAYS else FORGET_PER_LESSON
        self._busy_s = self._busy_s * keep + busy
        self._predicted_s = self._predicted_s * keep + predicted
        self._own_prefill_factor = _bounded(self._busy_s / self._predicted_s)
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._attention.learn(busy, predicted - attention, attention)
        self.refresh()
        self._fleet.prefilled(busy, predicted, attention)

    def prefill_abandoned(self, now: float, still_queued: int) -> None:
        """A request left before its first token: what the replica did for it cannot be told."""
        self._busy_since = now if still_queued else None

    def decoded(self, seconds: float, steps: int, sequences: int) -> None:
        """A request took ``seconds`` for ``steps`` tokens after its first, ``sequences`` decoding."""
        if steps < 4 or seconds <= 0.0:
            return
        self.steps_seen += 1
        if self.steps_seen >= LEARN_ALWAYS and self.steps_seen % LEARN_EVERY:
            return  # a sample will do
        sequences = max(1, sequences)
        fixed_s, step_s = self._decode.fixed_s, seconds / steps
        prior_s = fixed_s + self._decode.per_sequence_s * sequences
        ratio = _bounded(step_s / prior_s)
        self._step_error += _error_weight(self.steps_seen) * (
            _error(step_s, self.step_s(sequences)) - self._step_error
        )
        weight = max(DECODE_LESSON_WEIGHT, 1.0 / self.steps_seen)
        self._own_decode_factor += weight * (ratio - self._own_decode_factor)
        self._own_decode_share = _own_share(self.steps_seen)
        self._batch.learn(ratio * prior_s, fixed_s, prior_s - fixed_s)
        self.refresh()
        self._fleet.decoded(ratio, ratio * prior_s, fixed_s)


def _own_share(observations: int) -> float:
    square = observations * observations
    return square / (square + OWN_AFTER_OBSERVATIONS * OWN_AFTER_OBSERVATIONS)


def _bounded(factor: float) -> float:
    return min(SLOWEST, max(FASTEST, factor))


def _error(seen_s: float, predicted_s: float) -> float:
    return min(MOST_ERROR, abs(seen_s / predicted_s - 1.0))


def _error_weight(observations: int) -> float:
    return max(ERROR_WEIGHT, 1.0 / observations)
