"""Learns what work costs on one replica from what it did: a prefill by its three parts, decode by batch.

The prior is the operator's figures, what model and GPU suggest (``cost_prior``), or a default.
"""

from math import sqrt
from typing import Final

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.cost_shape import FORGET_PER_OBSERVATION, CostShape, Parts
from router.routing.fleet_speed import DECODE_LESSON_WEIGHT, FleetSpeed
from router.routing.learned import Learned
from router.routing.learned_speed import CostFit, bounded
from router.routing.ledger import Speed
from router.routing.work_done import WorkDone

DEFAULT_PREFILL = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6, attention_tokens=64_000.0)
DEFAULT_DECODE = DecodeCost(fixed_s=0.008, per_sequence_s=60e-6)
OWN_AFTER_OBSERVATIONS: Final = 5
FADE_S: Final = 60.0
"""A replica that shows nothing for so long has half as many observations to its name."""
FADE_AFTER_OTHERS: Final = 8
"""So has one that shows nothing while each of the others, on average, prefills so many requests."""
FADE_FROM: Final = 4 * OWN_AFTER_OBSERVATIONS
SURPRISE: Final = 3.0
"""Times what was predicted, or over it."""
LEARN_ALWAYS: Final = 32
LEARN_EVERY: Final = 4
"""From ``LEARN_ALWAYS`` observations on lessons are drawn from four at a time: learning costs time, too."""
FORGET_PER_LESSON: Final = FORGET_PER_OBSERVATION**LEARN_EVERY
REMEMBERED: Final = 50
"""Observations that count, of however many (``FORGET_PER_OBSERVATION``)."""
LEAST_DOUBT: Final = 0.1
MOST_DOUBT: Final = 0.5
ERROR_WEIGHT: Final = 0.05
MOST_ERROR: Final = 10.0


class ReplicaCost(Speed):
    """A prior, two learned factors (how much slower or faster than the prior this replica is), two shapes.

    Prefill: while at least one request waits for its first token the replica is prefilling, so the
    seconds it was busy, over the seconds the prior predicts for what it finished meanwhile, is its speed.
    Both sums forget with a half-life of about 35 requests. A replica that has shown little is taken to be
    like the rest of the fleet: its own factor counts ``n² / (n² + 25)`` after n requests. Without that, a
    replica never used would look faster than all others whenever the prior is too fast. How much of a prefill
    is attention and how much is fixed, and of a step its batch, is learned as in ``cost_shape``, around what
    the fleet shows. Without that, of two equal replicas the one that gets short prompts would look slower
    than the one that gets long ones wherever the prior's fixed part is too small.

    >>> cost = ReplicaCost(FleetSpeed(), PrefillCost(0.0, 100e-6), DecodeCost(0.01, 0.0))
    >>> for k in range(200):                          # a replica twice as slow as the prior, one at a time
    ...     cost.prefill_started(now=k * 1.0)
    ...     busy_s = cost.prefill_finished(now=k * 1.0 + 0.2016, still_queued=0)
    ...     cost.prefilled(busy_s, new_tokens=1_000, position=0)
    >>> round(cost.prefill_s(1_000, 0), 2)
    0.2
    """

    __slots__ = (
        "_attention_s",
        "_batch",
        "_busy_since",
        "_decode",
        "_fixed_s",
        "_fleet",
        "_lesson_at",
        "_lesson_number",
        "_new",
        "_new_fitted_s",
        "_own_decode_factor",
        "_own_decode_share",
        "_own_prefill_share",
        "_per_sequence_s",
        "_per_token_s",
        "_prefill",
        "_prefill_error",
        "_shape",
        "_step_error",
        "_step_s",
        "_work",
        "decode_factor",
        "doubt",
        "prefills_seen",
        "steps_seen",
        "surprised",
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
        self._lesson_number = 0
        """Of the fleet's prefills the last that was this one's."""
        self.surprised = False
        """Its last first token was ``surprising``."""
        self._shape, self._batch = CostShape(), CostShape()
        self._work, self._new = WorkDone(), WorkDone()
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
        self._own_decode_factor = 1.0
        self._own_prefill_share = self._own_decode_share = 0.0
        self._work.clear()
        self._new.clear()
        self._new_fitted_s = 0.0
        self._shape.forget()
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
        fleet, work, own = self._fleet, self._work, self._own_prefill_share
        self.doubt = self._doubt_of_prefill()
        """How far off, as a share, a prefill's cost may well be: two standard errors of what was seen."""
        parts = self._shape.fit(fleet.prefill_parts)
        self.prefill_factor, level = fleet.prefill_factor, bounded(fleet.work.level(parts))
        if own:
            self.prefill_factor += own * (bounded(work.factor) - self.prefill_factor)
            level += own * (bounded(work.level(parts)) - level)
        self._fixed_s = level * parts.third * self._prefill.fixed_s
        self._per_token_s = level * self._prefill.per_token_s
        self._attention_s = parts.second * self._per_token_s / self._prefill.attention_tokens
        self.decode_factor = factor = fleet.decode_factor + self._own_decode_share * (
            self._own_decode_factor - fleet.decode_factor
        )
        parts = self._batch.fit(fleet.batch_parts)
        level = self._batch.level(factor, parts, fleet.batch)
        self._step_s = level * self._decode.fixed_s
        self._per_sequence_s = level * parts.second * self._decode.per_sequence_s

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
        work = self._work
        return Learned(
            work.busy_s,
            work.token_s,
            work.attention_s,
            work.fixed_s,
            self.prefills_seen,
            self._own_decode_factor,
            self.steps_seen,
            self.prior_s,
            self._shape.fit(self._fleet.prefill_parts).pair,
            self._batch.fit(self._fleet.batch_parts).pair,
        )

    @property
    def prior_s(self) -> float:
        """What the prior says of 1,000 tokens."""
        return self._prefill.seconds(1_000, 0)

    def resumed(self, learned: Learned) -> None:
        """Take up what was learned elsewhere, if that was more."""
        if not learned.fits(self.prior_s) or learned.prefills <= self.prefills_seen:
            return
        self._work.clear()
        self._work.add(learned.busy_s, learned.token_s, learned.attention_s, learned.fixed_s)
        self.prefills_seen, self.steps_seen = learned.prefills, learned.decodes
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._own_decode_factor = learned.decode_factor
        self._own_decode_share = _own_share(self.steps_seen)
        self._shape.believed = Parts(*learned.prefill)
        self._batch.believed = Parts(*learned.batch)
        self.refresh()

    def prefill_started(self, now: float) -> None:
        """A request was sent; the replica is busy from here if it was not."""
        if self._busy_since is None:
            self._busy_since = now

    def prefill_finished(self, now: float, still_queued: int) -> float | None:
        """A first token was seen ``now``; ``still_queued`` requests still wait for theirs.

        Seconds that this prefill kept the replica busy, to be learned from once; ``None`` if that cannot be.
        """
        since = self._busy_since
        if since is None:
            return None
        self._busy_since = now if still_queued else None
        if self._fleet.blind:
            return None
        self._fleet.prefills += 1
        self._lesson_at, self._lesson_number = now, self._fleet.prefills
        return now - since

    def surprising(self, busy_s: float, new_tokens: int, position: int) -> bool:
        """A prefill, believed to be of ``new_tokens`` after ``position`` cached ones, took much shorter or
        longer than predicted, which other cached tokens than are believed would explain."""
        predicted_s = self.prefill_s(new_tokens, position)
        if busy_s < predicted_s / SURPRISE:
            return self.prefill_s(1, new_tokens + position - 1) < predicted_s / SURPRISE
        most_s = SURPRISE * predicted_s
        return busy_s > most_s and self.prefill_s(new_tokens + position, 0) > most_s

    def prefilled(self, busy_s: float, new_tokens: int, position: int) -> None:
        """Learn: ``busy_s`` seconds went into ``new_tokens`` tokens after ``position`` cached ones."""
        prior = self._prefill
        token_s = prior.per_token_s * new_tokens
        attention_s = token_s * (position + 0.5 * new_tokens) / prior.attention_tokens
        self._new.add(busy_s, token_s, attention_s, prior.fixed_s)
        self._new_fitted_s += self.prefill_s(new_tokens, position)
        self.prefills_seen += 1
        if self.prefills_seen < LEARN_ALWAYS or not self.prefills_seen % LEARN_EVERY:
            self._learn_prefill()

    def fade(self, now: float) -> None:
        """Believe less of what the replica showed the longer ago that was: it becomes like the others.

        One that was slow for a moment would else look slow for ever where the others can do all the work.
        Long ago is measured in time, and in what the others did meanwhile. One that is busy, however long its
        prompt, is about to show something. Called often.
        """
        if not self.prefills_seen or self._busy_since is not None:
            return
        others = self._fleet.prefills - self._lesson_number
        if now - self._lesson_at < FADE_S and others < FADE_AFTER_OTHERS * self._fleet.replicas:
            return
        self._lesson_number = self._fleet.prefills
        self._lesson_at = now
        self.prefills_seen = min(self.prefills_seen, FADE_FROM) // 2
        self.steps_seen = min(self.steps_seen, FADE_FROM) // 2
        self._work.keep(0.5)
        self._shape.fade()
        self._batch.fade()
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._own_decode_share = _own_share(self.steps_seen)
        self.refresh()

    def _doubt_of_prefill(self) -> float:
        seen = min(self.prefills_seen, REMEMBERED)
        if not seen:
            return MOST_DOUBT
        return min(MOST_DOUBT, max(LEAST_DOUBT, 2.0 * self._prefill_error / sqrt(seen)))

    def _learn_prefill(self) -> None:
        new = self._new
        self._prefill_error += _error_weight(self.prefills_seen) * (
            _error(new.busy_s, self._new_fitted_s) - self._prefill_error
        )
        self._work.keep(FORGET_PER_OBSERVATION if self.prefills_seen < LEARN_ALWAYS else FORGET_PER_LESSON)
        self._work.add(new.busy_s, new.token_s, new.attention_s, new.fixed_s)
        self._own_prefill_share = _own_share(self.prefills_seen)
        self._shape.learn(new.busy_s, new.token_s, new.attention_s, new.fixed_s)
        self.refresh()
        self._fleet.prefilled(new)
        new.clear()
        self._new_fitted_s = 0.0

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
        ratio = bounded(step_s / prior_s)
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


def _error(seen_s: float, predicted_s: float) -> float:
    return min(MOST_ERROR, abs(seen_s / predicted_s - 1.0))


def _error_weight(observations: int) -> float:
    return max(ERROR_WEIGHT, 1.0 / observations)
