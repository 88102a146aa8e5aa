"""Online plans: the arithmetic holds together, and the simulated fleet agrees with it."""

from functools import cache
from math import exp
from typing import Any

import pytest

from sim.plan.config import NumbersTraffic, SimulatePlan
from sim.plan.plan_error import PlanError
from sim.plan.trials import planned_trace
from sim.plan.worksheet import Report
from tests.sim.plan_examples import changed, example, report


@cache
def tried() -> Report:
    return report(changed("online", simulate={"requests": 800}), simulated=True)


def test_the_bill_is_the_sum_of_its_phases() -> None:
    made = example("online")
    prompts = made.value("prompt_dollars_m") * made.value("prompt_tps") * 3600 / 1e6
    replies = made.value("reply_dollars_m") * made.value("output_tps") * 3600 / 1e6
    assert prompts + replies == pytest.approx(made.value("dollars_h"))
    assert made.value("dollars_h") == made.value("replicas") * 2.50


def test_littles_law_holds_at_that_size() -> None:
    made = example("online")
    per_replica = made.value("each_per_s") * made.value("output_tokens") * made.value("tpot_ms") / 1e3
    assert made.value("running") == pytest.approx(per_replica)


def test_the_remaining_work_is_that_of_a_varying_prefill_and_a_steady_ride() -> None:
    made = example("online")
    mean = made.value("prefill_ms")
    variance = made.value("prefill_ms2") - mean**2
    service = mean + made.value("batch") * made.value("sequence_ms")
    assert made.value("residual_ms") == pytest.approx((variance + service**2) / (2 * service))
    # Lengths vary log-normally around the warm and the cold prefill.
    warm, cold = made.value("warm_ms"), made.value("cold_ms")
    assert made.value("prefill_ms2") == pytest.approx(exp(0.5**2) * (0.9 * warm**2 + 0.1 * cold**2))


def test_one_replica_at_its_batch_keeps_the_promise_per_token_and_no_more() -> None:
    # At utilization 1 a replica's batch is `batch_tpot`, and each token takes exactly the promised time.
    made = example("online")
    step_ms = made.value("step_ms") + made.value("batch_tpot") * made.value("sequence_ms")
    rate_per_ms = 1 / (
        made.value("prefill_ms") + made.value("output_tokens") * step_ms / made.value("batch_tpot")
    )
    tpot_ms = step_ms / (1 - rate_per_ms * made.value("prefill_ms"))
    assert tpot_ms == pytest.approx(made.value("slo_tpot_ms"))


def test_the_simulated_fleet_agrees_with_the_arithmetic() -> None:
    made = tried()
    assert made.value("simulated_hit_rate") == pytest.approx(made.value("hit_rate"), abs=0.03)
    assert made.value("simulated_tpot_mean_ms") == pytest.approx(made.value("tpot_ms"), rel=0.25)
    assert made.value("simulated_ttft_mean_ms") == pytest.approx(made.value("ttft_ms"), rel=0.35)
    assert made.value("simulated_in_slo") >= 0.95
    assert made.value("simulated_replicas") <= made.value("replicas")


def test_the_search_stops_at_the_fewest_replicas_that_keep_the_promise() -> None:
    made = tried()
    fewest = int(made.value("simulated_replicas"))
    replicas = int(made.value("replicas"))
    kept = made.value("simulated_in_slo" if fewest == replicas else f"simulated_{fewest}_in_slo")
    assert kept >= 0.95 > made.value(f"simulated_{fewest - 1}_in_slo")
    assert any(f"Simulated, {fewest} would keep the promise" in sentence for sentence in made.answer)


def test_a_trace_brings_its_own_traffic() -> None:
    made = report(changed("online_trace", simulate={"requests": 300}), simulated=True)
    assert made.value("prompt_tokens") == pytest.approx(13_733, abs=1)
    assert made.value("ideal_hit_rate") == pytest.approx(0.2155, abs=1e-4)
    assert made.value("hit_rate") == pytest.approx(0.9 * made.value("ideal_hit_rate"))
    assert made.value("requests_per_s") == pytest.approx(2 * made.value("recorded_per_s"))
    assert made.value("warm_ms") < made.value("prefill_ms") < made.value("cold_ms")
    assert made.value("simulated_replicas") >= 1


def test_sessions_count_by_their_turns() -> None:
    traffic = {"kind": "trace", "trace": "chats", "rate": 0.5, "of_ideal": 0.9, "requests": 400}
    made = report(changed("online", traffic=traffic))
    assert made.value("requests_per_s") == pytest.approx(0.5 * made.value("turns"))
    assert made.value("turns") > 2


def needed(**changes: Any) -> float:
    return report(changed("online", **changes)).value("replicas")


def test_more_warmth_speed_and_patience_need_no_more_replicas() -> None:
    base = needed()
    assert needed(traffic__warm_share=0.0) > base
    assert needed(traffic__warm_share=1.0) <= base
    assert needed(traffic__requests_per_s=120) > base
    assert needed(replica__gpu="b200") < base
    assert needed(replica__precision="fp8") < base
    assert needed(slo={"ttft_ms": 500, "tpot_ms": 200, "share": 0.95}) <= base
    assert needed(max_utilization=0.4) > base


def test_a_promise_that_no_batch_keeps_is_said_to_be_so() -> None:
    made = report(changed("online", slo={"tpot_ms": 3}))
    assert made.answer == (
        f"No batch meets 3 ms per token: one step alone takes {made.value('step_ms'):.1f} ms. Take a faster "
        "GPU, more of them per replica, or a smaller precision.",
    )


def test_a_request_that_does_not_fit_is_refused() -> None:
    plan = changed("online_measured", replica__kv_tokens=3_000)
    with pytest.raises(
        PlanError, match="a request of 3,550 tokens, prompt and reply, does not fit into 3,000"
    ):
        report(plan)


def test_requests_that_the_simulated_replicas_refuse_are_counted() -> None:
    plan = changed("online_measured", replica__kv_tokens=3_600, simulate={"requests": 60})
    made = report(plan, simulated=True)
    assert any("simulated requests" in one and "too long for the replica" in one for one in made.answer)


def test_prefixes_that_do_not_fit_are_said_to_be_so() -> None:
    made = report(changed("online", traffic__prefixes=5_000))
    assert made.value("prefix_tokens") == 5_000 * 2_900
    assert any("plan with a smaller warm_share" in sentence for sentence in made.answer)


def test_a_fleet_whose_caches_are_too_small_is_found_out_by_simulation() -> None:
    plan = changed("online_measured", replica__kv_tokens=40_000, simulate={"requests": 300})
    made = report(plan, simulated=True)
    assert made.value("hit_rate_gap") > 0.1
    assert any("points fewer than planned" in sentence for sentence in made.answer)


def test_the_planned_trace_has_the_plans_averages() -> None:
    traffic = NumbersTraffic(
        kind="numbers",
        requests_per_s=20,
        prompt_tokens=3_300,
        shared_tokens=2_900,
        warm_share=0.8,
        output_tokens=250,
        prefixes=8,
    )
    trace = planned_trace(traffic, SimulatePlan(requests=4_000))
    count = len(trace.requests)
    assert sum(one.prompt_tokens for one in trace.requests) / count == pytest.approx(3_300, rel=0.02)
    assert sum(one.output_tokens for one in trace.requests) / count == pytest.approx(250, rel=0.05)
    assert (trace.requests[-1].timestamp_ms or 0.0) / count == pytest.approx(50, rel=0.05)
    firsts = [one.block_ids[0] for one in trace.requests]
    shared = {block for block in firsts if firsts.count(block) > 1}
    assert len(shared) == 8
    assert sum(block in shared for block in firsts) / count == pytest.approx(0.8, abs=0.03)
