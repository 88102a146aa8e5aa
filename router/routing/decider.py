"""Where a request goes: who may take it, what they hold of it, the figures behind the prices, the choice."""

from collections.abc import Collection, Mapping, Sequence

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.decision import Assessment, Decision, NoReplica, Reason
from router.routing.hot_prefixes import HotPrefixes
from router.routing.journal import Journal
from router.routing.kv_route import Role
from router.routing.ledger import UTILIZATION_REFRESH_S
from router.routing.policies.own_delay import decide_by_load
from router.routing.pools import Pools
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.roster import Candidates, Roster
from router.routing.shortlist import PRICE_ALL_UP_TO, Shortlist
from router.routing.traffic import Traffic
from router.routing.universal_head import UniversalHead
from router.routing.view import MatchedTokens, Policy, RoutingRequest


class Decider:
    """Owned by the fleet. A decision changes nothing but what is counted of hot prefixes."""

    __slots__ = (
        "_caches",
        "_mean_utilization",
        "_mean_utilization_at",
        "_pools",
        "_replicas",
        "_shortlist",
        "_traffic",
        "_universal_head",
        "hot",
        "journal",
        "policy",
        "selectable",
    )

    def __init__(
        self,
        policy: Policy,
        selectable: Mapping[str, Policy],
        replicas: Roster,
        caches: CacheBeliefs,
        traffic: Traffic,
        shortlist: Shortlist,
        hot: HotPrefixes,
    ) -> None:
        """``selectable``: other policies, by kind, that a request may ask for."""
        self.policy = policy
        self.selectable = selectable
        self._replicas = replicas
        self._caches = caches
        self._traffic = traffic
        self._shortlist = shortlist
        self._pools = Pools(shortlist)
        self._universal_head = UniversalHead()
        self.hot = hot
        self.journal: Journal | None = None
        self._mean_utilization = 0.0
        self._mean_utilization_at = -UTILIZATION_REFRESH_S

    def rule(self, kind: str | None) -> Policy:
        """The selectable policy of this ``kind`` if there is one, else the fleet's."""
        return self.policy if kind is None else self.selectable.get(kind, self.policy)

    def decide(
        self,
        prompt: Prompt,
        now: float,
        tried: Collection[int],
        session: str | None,
        policy: str | None,
        within: Collection[int] | None = None,
        two_steps: bool = False,
    ) -> Decision:
        """Where ``prompt`` goes. ``two_steps``: it can be prefilled apart. Raises ``NoReplica``."""
        rule = self.rule(policy)
        found, request, levels = self._asked(prompt, now, tried, session, within)
        if levels and (crowd := self.hot.price(request, prompt, levels)) is not None and not tried:
            self.hot.heated(crowd.keys, crowd.prefill_s, now)
            if self.journal is not None:
                self.journal.prefixes_asked(crowd.keys, crowd.prefill_s)
        if not tried:
            self._universal_head.asked(prompt)
        candidates: Sequence[ReplicaState] = found.replicas
        if found.moves_kv:
            decision = self._pools.choose(rule, request, found, levels, two_steps=two_steps and not tried)
        else:
            if len(candidates) > PRICE_ALL_UP_TO and rule.samples:
                candidates = self._shortlist.draw(candidates, found.bits, levels)
            one = len(candidates) == 1
            decision = _only(request, candidates[0]) if one else rule.choose(request, candidates)
        if tried:
            return decision.because(Reason.RETRY)
        return decision.because(Reason.PANIC) if found.panic else decision

    def prefill(
        self,
        prompt: Prompt,
        now: float,
        tried: Collection[int],
        policy: str | None,
        within: Collection[int] | None = None,
    ) -> Decision:
        """Another prefill replica after those ``tried``. Raises ``NoReplica``."""
        found, request, levels = self._asked(prompt, now, tried, None, within)
        return self._pools.prefill(self.rule(policy), request, found, levels).because(Reason.RETRY)

    def answerer(
        self,
        prompt: Prompt,
        now: float,
        source: ReplicaState,
        tried: Collection[int],
        session: str | None,
        policy: str | None,
        within: Collection[int] | None = None,
    ) -> Decision:
        """Who answers ``prompt``, which ``source`` has computed. Raises ``NoReplica``."""
        found, request, levels = self._asked(prompt, now, tried, session, within)
        return self._pools.answerer(self.rule(policy), request, found, levels, source)

    def _asked(
        self,
        prompt: Prompt,
        now: float,
        tried: Collection[int],
        session: str | None = None,
        within: Collection[int] | None = None,
    ) -> tuple[Candidates, RoutingRequest, list[tuple[int, int]]]:
        found = self._replicas.candidates(prompt.model, tried, within)
        levels = self._caches.levels(prompt)
        request = self._request(prompt, now, session, levels)
        if levels:
            self._note_universal_head(request, prompt, found, levels)
        return found, request, levels

    def _note_universal_head(
        self, request: RoutingRequest, prompt: Prompt, found: Candidates, levels: list[tuple[int, int]]
    ) -> None:
        """Tell how much of ``prompt`` most of the traffic begins with, where some lack it and some do not."""
        lack = found.bits & ~levels[-1][0]
        if lack and (blocks := self._universal_head.blocks(prompt, len(found.replicas))):
            tokens = self._caches.tokens_of(prompt, blocks)
            for holders, matched in levels:
                if matched >= tokens:
                    lack &= ~holders
            if lack and tokens <= levels[-1][1]:
                request.universal_tokens = tokens

    def others(
        self,
        prompt: Prompt,
        now: float,
        chosen: int,
        count: int,
        session: str | None,
        policy: str | None,
        within: Collection[int] | None,
    ) -> list[int]:
        """Up to ``count`` replicas, best first, for ``prompt`` should ``chosen`` not answer."""
        levels = self._caches.levels(prompt)
        request = self._request(prompt, now, session, levels)
        if levels:
            self.hot.price(request, prompt, levels)
        rule = self.rule(policy).copy()  # asking must not advance a turn or a random generator
        taken = [chosen]
        try:
            while len(taken) <= count:
                found = self._replicas.candidates(prompt.model, taken, within)
                candidates: Sequence[ReplicaState] = found.replicas
                if found.moves_kv:
                    candidates = [one for one in candidates if one.role is not Role.PREFILL]
                    if not candidates:
                        break
                if len(candidates) > PRICE_ALL_UP_TO and rule.samples:
                    candidates = self._shortlist.draw(candidates, found.bits, levels)
                taken.append(rule.choose(request, candidates).replica)
        except NoReplica:
            pass
        return taken[1:]

    def explain(
        self,
        prompt: Prompt,
        now: float,
        session: str | None,
        policy: str | None,
        within: Collection[int] | None = None,
        *,
        two_steps: bool,
    ) -> tuple[Decision, list[Assessment], RoutingRequest]:
        """The decision, what every candidate would cost alone, and the figures behind the prices.

        Raises ``NoReplica``.
        """
        found, request, levels = self._asked(prompt, now, (), session, within)
        candidates = found.replicas
        if levels:
            self.hot.price(request, prompt, levels)
        rule = self.rule(policy)
        assessments = rule.assess(request, candidates)
        if found.moves_kv:
            decision = self._pools.choose(rule.copy(), request, found, levels, two_steps=two_steps)
        elif len(candidates) == 1:
            decision = _only(request, candidates[0])
        else:  # a copy decides: asking must not advance a turn or a random generator
            decision = rule.copy().choose(request, candidates)
        if found.panic:
            decision = decision.because(Reason.PANIC)
        return decision, assessments, request

    def _request(
        self, prompt: Prompt, now: float, session: str | None, levels: list[tuple[int, int]]
    ) -> RoutingRequest:
        ratio = self._caches.tokens_per_unit(prompt)
        count = self._replicas.slots
        matched: Sequence[int]
        if count > PRICE_ALL_UP_TO:
            matched = MatchedTokens(levels, count)
        else:
            matched = by_replica = [0] * count
            for mask, tokens in levels:
                while mask:
                    low = mask & -mask
                    by_replica[low.bit_length() - 1] = tokens
                    mask ^= low
        traffic = self._traffic
        return RoutingRequest(
            now,
            max(1, int(prompt.units * ratio)),
            matched,
            session,
            prompt,
            ratio,
            traffic.arrivals_per_s(now) / (len(self._replicas.serving) or 1),
            self._utilization(now),
            traffic.decode_price,
            traffic.expected_output_tokens(prompt.max_tokens),
        )

    def _utilization(self, now: float) -> float:
        """Mean share of the last minute that prefill fills on replicas that get work; counted again every
        quarter of a second, and what idle replicas showed of their speed counts a little less.
        """
        if now - self._mean_utilization_at > UTILIZATION_REFRESH_S:
            self._mean_utilization_at = now
            serving = self._replicas.serving
            self._mean_utilization = sum(r.ledger.utilization(now) for r in serving) / (len(serving) or 1)
            for replica in serving:
                replica.cost.fade(now)
        return self._mean_utilization


def _only(request: RoutingRequest, candidate: ReplicaState) -> Decision:
    """There is nothing to choose."""
    return decide_by_load(request, candidate).because(Reason.ONLY)
