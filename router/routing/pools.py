"""Where a request goes in a fleet that moves KV: one replica that computes or pulls, or two pools, two steps.

The policy prices everything in seconds, as always. Two things are added here:

- **A pull** stands in the policy's place of prefill. A candidate that holds h tokens and would pull up to s
  of them in X seconds is shown to the policy as one that holds h' tokens, where computing h' .. s takes as
  long as X: so every policy weighs a pull as it does a prefill, and none takes longer than computing.
- **A decode replica's prefill is priced twice**: once as this request's own delay, once as the stall of the
  streams that the pool is there for. A cold prompt then goes to the prefill pool as soon as computing it
  takes longer than moving it, and a warm one straight to the decode replica that holds its prefix.

::

    one step    cost(d) + T_d if d is a decode replica      d: decode or both; T_d: what it computes or pulls
    two steps   cost(p) of a reply of one token  +  cost(d) with X_d and the last token as its prefill

Each ``cost`` is the policy's: wait, prefill, what is imposed on others, own decoding. The least total wins,
two steps if they save a twentieth of the prefill.
"""

from collections.abc import Sequence
from typing import Final

from router.routing.decision import Decision, NoReplica, Reason
from router.routing.kv_route import KvPull, KvRoute, Role, Step
from router.routing.replica_state import ReplicaState
from router.routing.roster import Candidates
from router.routing.shortlist import PRICE_ALL_UP_TO, Shortlist
from router.routing.view import Policy, RoutingRequest

CHORDS: Final = 3
LEAST_GAIN: Final = 0.05
"""Two steps must save this share of the prefill: two replicas can fail, and a transfer is less sure."""
NO_ANSWERER: Final = "no decode replica, and none with role both, can take the request"


class Pools:
    """Owned by the decider. A question here changes nothing; the policy's own state is the policy's."""

    __slots__ = ("_levels", "_shortlist")

    def __init__(self, shortlist: Shortlist) -> None:
        self._shortlist = shortlist
        self._levels: list[tuple[int, int]] = []

    def choose(
        self,
        rule: Policy,
        request: RoutingRequest,
        found: Candidates,
        levels: list[tuple[int, int]],
        *,
        two_steps: bool,
    ) -> Decision:
        """The decision, its ``route`` set. ``two_steps``: the request can be prefilled apart.

        Raises ``NoReplica`` when nobody is left to answer.
        """
        self._levels = levels
        answering = [replica for replica in found.replicas if replica.role is not Role.PREFILL]
        if not answering:
            raise NoReplica("none_usable", NO_ANSWERER)
        best: Decision | None = None
        one_step_s = 0.0
        source = _source(request, found.replicas)
        pulling = request if source is None else _pulling(request, answering, source)
        for role in (Role.DECODE, Role.BOTH):
            pool = [replica for replica in answering if replica.role is role]
            if not pool:
                continue
            decision = self._chosen(rule, pulling, pool)
            replica = _of(pool, decision.replica)
            total_s = rule.assess(pulling, [replica])[0].total_s
            if role is Role.DECODE:
                total_s += decision.prefill_s
            if best is None or total_s < one_step_s:
                best, one_step_s = _routed(decision, request, replica, source), total_s
        assert best is not None
        split = self._two_steps(rule, request, found.replicas, answering) if two_steps else None
        if split is None:
            return best.routed(_priced(best.route, one_step_s, None))
        first, two_steps_s = split
        chosen = first if two_steps_s < one_step_s - LEAST_GAIN * best.prefill_s else best
        return chosen.routed(_priced(chosen.route, one_step_s, two_steps_s))

    def prefill(
        self, rule: Policy, request: RoutingRequest, found: Candidates, levels: list[tuple[int, int]]
    ) -> Decision:
        """Another prefill replica for a request whose first step failed. Raises ``NoReplica``."""
        self._levels = levels
        answering = [replica for replica in found.replicas if replica.role is not Role.PREFILL]
        split = self._two_steps(rule, request, found.replicas, answering)
        if split is None:
            raise NoReplica("none_usable", "no prefill replica can take the request")
        first, total_s = split
        return first.routed(_priced(first.route, None, total_s))

    def answerer(
        self,
        rule: Policy,
        request: RoutingRequest,
        found: Candidates,
        levels: list[tuple[int, int]],
        source: ReplicaState,
    ) -> Decision:
        """The second step: who pulls from ``source``, which has computed the prompt, and answers.

        Without anybody who can pull: who computes it. Raises ``NoReplica`` when nobody is left to answer.
        """
        self._levels = levels
        pulling = [replica for replica in found.replicas if _can_pull(replica, source)]
        if not pulling:
            return self.choose(rule, request, found, levels, two_steps=False).because(Reason.HANDOFF)
        tokens = request.prompt_tokens - 1
        seen = request.with_matched(_effective(request, pulling, source, tokens))
        decision = self._chosen(rule, seen, pulling)
        route = _route(request, _of(pulling, decision.replica), source, tokens)
        return _as_pulled(decision, request, _of(pulling, decision.replica), route).because(Reason.HANDOFF)

    def _two_steps(
        self,
        rule: Policy,
        request: RoutingRequest,
        replicas: Sequence[ReplicaState],
        answering: Sequence[ReplicaState],
    ) -> tuple[Decision, float] | None:
        """The first step's decision and the total of both; None: there are no two pools for it."""
        giving = [
            replica
            for replica in replicas
            if replica.role is Role.PREFILL and any(_can_pull(other, replica) for other in answering)
        ]
        if not giving:
            return None
        short = request.with_reply(1.0)
        first = self._chosen(rule, short, giving)
        source = _of(giving, first.replica)
        first_s = rule.assess(short, [source])[0].total_s
        pulling = [replica for replica in answering if _can_pull(replica, source)]
        tokens = request.prompt_tokens - 1
        there = request.matched_tokens
        effective = _effective(request, pulling, source, tokens)
        pulling = [replica for replica in pulling if effective[replica.index] > there[replica.index]]
        if not pulling:
            return None  # whoever answers computes it sooner than it is moved
        seen = request.with_matched(effective)
        # The second step is chosen when it comes: a policy that takes turns must not have its turn now.
        second = min(rule.assess(seen, self._some(rule, pulling)), key=lambda row: row.total_s)
        answerer = _of(pulling, second.replica)
        route = _route(request, answerer, source, tokens)._replace(
            step=Step.PREFILL, other=answerer.index, decode_wait_s=second.wait_s
        )
        return first.routed(route), first_s + second.total_s

    def _chosen(self, rule: Policy, request: RoutingRequest, pool: Sequence[ReplicaState]) -> Decision:
        return rule.choose(request, self._some(rule, pool))

    def _some(self, rule: Policy, pool: Sequence[ReplicaState]) -> Sequence[ReplicaState]:
        if len(pool) <= PRICE_ALL_UP_TO or not rule.samples:
            return pool
        return self._shortlist.draw(pool, Candidates(pool).bits, self._levels)


def _of(pool: Sequence[ReplicaState], index: int) -> ReplicaState:
    return next(replica for replica in pool if replica.index == index)


def _can_pull(replica: ReplicaState, source: ReplicaState) -> bool:
    """``replica`` can pull what ``source`` has computed for it."""
    if replica is source or replica.role is Role.PREFILL:
        return False
    if replica.spec.kv_pull is KvPull.WARMROUTE:
        return source.spec.kv_source is not None
    way = replica.spec.kv_pull
    return way in (KvPull.VLLM, KvPull.LLMD) and source.spec.kv_pull is way


def _source(request: RoutingRequest, replicas: Sequence[ReplicaState]) -> ReplicaState | None:
    """Who holds most of the prompt and gives it to whoever asks; of several the least busy."""
    matched = request.matched_tokens
    holding = [one for one in replicas if one.spec.kv_source is not None and matched[one.index]]
    if not holding:
        return None
    return max(holding, key=lambda one: (matched[one.index], -one.ledger.in_flight))


def _pulling(
    request: RoutingRequest, replicas: Sequence[ReplicaState], source: ReplicaState
) -> RoutingRequest:
    """The request as the policy is to see it when what is missing may be pulled from ``source``."""
    pulling = [one for one in replicas if one.spec.kv_pull is KvPull.WARMROUTE and one is not source]
    if not pulling:
        return request
    tokens = request.matched_tokens[source.index]
    return request.with_matched(_effective(request, pulling, source, tokens))


def _effective(
    request: RoutingRequest, replicas: Sequence[ReplicaState], source: ReplicaState, tokens: int
) -> list[int]:
    """Matched tokens by replica index, those of ``replicas`` as if their pull were computing.

    With T(h) the prefill after h cached tokens, h' is where T(h') = T(tokens) + the transfer.
    """
    seen = list(request.matched_tokens)
    for replica in replicas:
        matched = seen[replica.index]
        if matched >= tokens:
            continue
        route = _route(request, replica, source, tokens)
        least_s = _prefill_s(request, replica, tokens)
        if least_s + route.transfer_s < _prefill_s(request, replica, matched):
            # T falls ever faster: each chord's end lies before h', and the next one's nearer.
            for _ in range(CHORDS):
                saved_s = _prefill_s(request, replica, matched) - least_s
                if saved_s <= route.transfer_s:
                    break
                matched = tokens - int((tokens - matched) * route.transfer_s / saved_s)
            seen[replica.index] = matched
    return seen


def _prefill_s(request: RoutingRequest, replica: ReplicaState, matched: int) -> float:
    return replica.cost.prefill_s(request.prompt_tokens - matched, matched)


def _route(request: RoutingRequest, replica: ReplicaState, source: ReplicaState, tokens: int) -> KvRoute:
    """What pulling the first ``tokens`` from ``source`` means for ``replica``."""
    moved = max(0, tokens - request.matched_tokens[replica.index])
    transfer_s = replica.transfer.seconds(moved, request.now) if moved else 0.0
    return KvRoute(Step.PULL, source.index, tokens, moved, transfer_s)


def _routed(
    decision: Decision, request: RoutingRequest, replica: ReplicaState, source: ReplicaState | None
) -> Decision:
    """A one-step decision as it is: with the tokens that are there, and the pull if there is one."""
    matched = request.matched_tokens[replica.index]
    if source is None or decision.matched_tokens == matched:
        return decision.routed(KvRoute(Step.DIRECT))
    route = _route(request, replica, source, request.matched_tokens[source.index])
    return _as_pulled(decision, request, replica, route)


def _as_pulled(
    decision: Decision, request: RoutingRequest, replica: ReplicaState, route: KvRoute
) -> Decision:
    """What the policy took for computed is pulled: the transfer, and computing what follows it."""
    prefill_s = route.transfer_s + _prefill_s(request, replica, max(route.tokens, decision.matched_tokens))
    return decision.routed(route, matched_tokens=request.matched_tokens[replica.index], prefill_s=prefill_s)


def _priced(route: KvRoute | None, one_step_s: float | None, two_steps_s: float | None) -> KvRoute:
    return (route or KvRoute(Step.DIRECT))._replace(one_step_s=one_step_s, two_steps_s=two_steps_s)
