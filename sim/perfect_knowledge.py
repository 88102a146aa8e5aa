"""A bound for what can be known: the router's own policy, told what no router is told.

``perfect_knowledge`` decides as ``predicted_finish`` does, but every cache's changes reach it at once,
requests tell how long their reply will be, replicas are probed four times a second, what prefill and decode
cost is known from the start, for each replica. What it gains over ``predicted_finish`` is what better
information could gain; what ``pooled_cache`` gains is what separate caches cost. Not a proven bound: nobody
knows the requests to come.
"""

from dataclasses import replace

from replica.batch import Batch
from replica.contract.cost_fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from sim.kv_event_feed import KvEventSettings
from sim.simulation_settings import SimulationSettings
from sim.step_time.step_time import StepTime, cold_prefill_s

PROBE_EVERY_S = 0.25
PROMPTS = (64, 512, 2_048, 8_192, 32_768)
BATCHES = (1, 8, 32, 128)
CONTEXT_TOKENS = 2_048
"""Of each request in a batch whose step is priced."""


def informed(settings: SimulationSettings) -> SimulationSettings:
    """``settings`` with nothing late, lost or guessed."""
    return replace(
        settings,
        kv_events=KvEventSettings(delay_s=0.0),
        tell_max_tokens=True,
        report_interval_s=min(settings.report_interval_s, PROBE_EVERY_S),
        report_lag_s=0.0,
        peer_lag_s=0.0 if settings.routers > 1 else settings.peer_lag_s,
        true_costs=True,
    )


def true_costs(step_time: StepTime, max_batched_tokens: int) -> tuple[PrefillCost, DecodeCost]:
    """What the router's cost model comes to for a replica with ``step_time``.

    >>> from sim.step_time.presets import PRESETS
    >>> prefill, decode = true_costs(PRESETS["emufleet"], 8_192)
    >>> round(1e6 * prefill.per_token_s), round(1e6 * decode.per_sequence_s)     # of 62.5 and 60
    (62, 60)
    """
    prefill, _ = fit_prefill(
        [PrefillPoint(tokens, 0, cold_prefill_s(step_time, tokens, max_batched_tokens)) for tokens in PROMPTS]
    )
    decode, _ = fit_decode(
        [
            DecodePoint(batch, step_time.seconds(Batch((), batch, batch * CONTEXT_TOKENS, 0)))
            for batch in BATCHES
        ]
    )
    return prefill, decode
