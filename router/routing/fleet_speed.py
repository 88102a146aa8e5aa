"""What replicas have in common: the speed one is taken to have until it shows its own."""

from typing import TYPE_CHECKING, Final

from router.routing.cost_shape import AS_PREDICTED, FORGET_PER_OBSERVATION, CostShape, Parts
from router.routing.learned import Learned
from router.routing.learned_speed import bounded
from router.routing.work_done import WorkDone

if TYPE_CHECKING:
    from router.routing.calibration import ReplicaCost

PRIOR_OBSERVATIONS_S: Final = 0.05
"""Of prefill that took as long as the prior says, before there is any."""
DECODE_LESSON_WEIGHT: Final = 0.08


class FleetSpeed:
    """Learns from all replicas' lessons, and tells them."""

    __slots__ = (
        "_members",
        "_next_news",
        "_seen",
        "batch",
        "batch_parts",
        "blind",
        "decode_factor",
        "prefill",
        "prefill_factor",
        "prefill_parts",
        "prefills",
        "work",
    )

    def __init__(self) -> None:
        self._members: list[ReplicaCost] = []
        self.prefills = 0
        """Requests that replicas were seen to prefill."""
        self.blind = False
        """Other routers send work that is not told of: how long a prefill takes says nothing meanwhile."""
        self.prefill, self.batch = CostShape(), CostShape()
        self.work = WorkDone()
        self.forget()

    def forget(self) -> None:
        """The priors changed: factors learned over the old ones mean nothing."""
        self.prefill_factor = 1.0
        self.decode_factor = 1.0
        self.prefill_parts = self.batch_parts = AS_PREDICTED
        self.prefill.forget()
        self.batch.forget()
        self.work.clear()
        self.work.add(PRIOR_OBSERVATIONS_S, PRIOR_OBSERVATIONS_S, 0.0, 0.0)
        self._seen = 0
        self._next_news = 1

    def join(self, cost: "ReplicaCost") -> None:
        """``cost`` follows the fleet from now on."""
        self._members.append(cost)

    def leave(self, cost: "ReplicaCost") -> None:
        """``cost`` follows no longer."""
        self._members.remove(cost)

    @property
    def replicas(self) -> int:
        """How many follow."""
        return len(self._members)

    @property
    def learned(self) -> Learned:
        """To be taken up again."""
        work = self.work
        return Learned(
            work.busy_s,
            work.token_s,
            work.attention_s,
            work.fixed_s,
            self._seen,
            self.decode_factor,
            self._seen,
            self._prior_s,
            self.prefill_parts.pair,
            self.batch_parts.pair,
        )

    @property
    def _prior_s(self) -> float:
        return sum(member.prior_s for member in self._members) / (len(self._members) or 1)

    def resumed(self, learned: Learned) -> None:
        """Take up what was learned elsewhere, if that was more."""
        if learned.fits(self._prior_s) and learned.prefills > self._seen:
            self.work.clear()
            self.work.add(learned.busy_s, learned.token_s, learned.attention_s, learned.fixed_s)
            self._next_news = self._seen = learned.prefills
            self.prefill_factor = bounded(self.work.factor)
            self.decode_factor = learned.decode_factor
            self.prefill.believed = self.prefill_parts = Parts(*learned.prefill)
            self.batch.believed = self.batch_parts = Parts(*learned.batch)
            self._tell()

    def prefilled(self, done: WorkDone) -> None:
        """Some replica did this, by its prior."""
        self.prefill.learn(done.busy_s, done.token_s, done.attention_s, done.fixed_s)
        self.prefill_parts = self.prefill.fit(AS_PREDICTED)
        self.work.keep(FORGET_PER_OBSERVATION)
        self.work.add(done.busy_s, done.token_s, done.attention_s, done.fixed_s)
        self.prefill_factor = bounded(self.work.factor)
        self._tell()

    def decoded(self, ratio: float, step_s: float, fixed_s: float) -> None:
        """A replica's decode steps took ``step_s``, ``ratio`` times the prior's with its ``fixed_s``."""
        prior_s = step_s / ratio
        self.batch.learn(step_s, fixed_s, prior_s - fixed_s)
        self.batch_parts = self.batch.fit(AS_PREDICTED)
        self.decode_factor += max(DECODE_LESSON_WEIGHT, 1.0 / (self._seen + 2)) * (ratio - self.decode_factor)
        self._tell()

    def _tell(self) -> None:
        """Members are told at once while little is known, then every so often: telling costs O(replicas)."""
        self._seen += 1
        if self._seen >= self._next_news:
            self._next_news = self._seen + min(self._seen // 4 + 1, len(self._members))
            for member in self._members:
                member.refresh()
