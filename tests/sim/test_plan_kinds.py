"""Long prompts, offline, memory, tiers, hybrid: each answer against an independent calculation."""

import pytest

from replica.batch import Batch
from replica.contract.roofline.roofline import RooflineStepTime
from sim.plan.plan_error import PlanError
from tests.sim.plan_examples import changed, example, report

# Long prompts


def test_the_new_tokens_that_fit_take_exactly_the_budget() -> None:
    made = example("long_prompts")
    new, prompt = made.value("new_max"), made.value("prompt_tokens")
    spread = 1 + (prompt - new + new / 2) / made.value("prefill_attention_tokens")
    prefill_ms = made.value("prefill_fixed_ms") + new * made.value("prefill_token_us") * spread / 1e3
    assert prefill_ms == pytest.approx(made.value("budget_ms"))
    assert made.value("warm_needed") == 1 - new / prompt


def test_a_target_that_a_cold_prompt_meets_needs_no_warmth() -> None:
    made = report(changed("long_prompts", ttft_target_ms=20_000))
    assert made.value("warm_needed") == 0
    assert "fits the target of 20,000 ms" in made.answer[1]
    assert not any("Cold requests" in sentence for sentence in made.answer)


def test_a_target_below_the_transfer_leaves_nothing_for_prefill() -> None:
    made = report(changed("long_prompts", ttft_target_ms=200))
    assert made.value("warm_needed") == 1
    assert "does not fit" in made.answer[0]


def test_the_best_split_carries_what_the_slower_pool_carries() -> None:
    made = report(changed("long_prompts", replica__gpus=24, prefill_gpus=4, decode_gpus=4))
    rates = [
        min(made.value(f"split_{count}_prefill_rate"), made.value(f"split_{count}_decode_rate"))
        for count in range(1, 6)
    ]
    assert f"carries {max(rates):.2f} requests/s" in made.answer[-1]
    assert rates.index(max(rates)) > 0  # prefill is the slower pool here


def test_both_pools_are_tried() -> None:
    made = report(changed("long_prompts", simulate={"requests": 300}), simulated=True)
    assert made.value("decode_simulated_tpot_mean_ms") == pytest.approx(made.value("tpot_ms"), rel=0.2)
    assert made.value("prefill_simulated_ttft_p50_ms") == pytest.approx(
        made.value("prefill_warm_ms"), rel=0.2
    )


def test_a_decode_replica_too_small_for_one_sequence_is_said_to_be_so() -> None:
    made = report(changed("long_prompts", prompt_tokens=600_000, shared_tokens=500_000))
    assert made.answer[-1].startswith("A decode replica of 4 GPUs holds 0.8 such sequences")


# Offline


def test_one_replica_takes_the_time_that_the_arithmetic_says() -> None:
    made = example("offline", simulated=True)
    assert made.value("simulated_ratio") == pytest.approx(1.0, abs=0.06)


def test_reuse_in_order_is_tried_too() -> None:
    # The sample is 400 requests: with as many in all, and 8 groups, it is the whole batch.
    made = report(
        changed("offline", reuse=True, sorted_by_prefix=True, groups=8, requests=400), simulated=True
    )
    assert made.value("now_hits") == 1 - 8 / 400
    assert made.value("simulated_ratio") == pytest.approx(1.0, abs=0.08)


def test_a_batch_past_the_crossing_is_bound_by_math() -> None:
    made = report(changed("offline", running=500, prompt_tokens=200, shared_tokens=100))
    assert made.value("now_batch") == 500 > made.value("now_batch_math")
    model = RooflineStepTime.of("llama-3.1-70b", "h100", tensor_parallel=4)
    seconds = model.seconds(Batch((), 500, 500 * (200 + 75), 0))
    assert made.value("now_full_step_ms") / 1e3 == pytest.approx(seconds, rel=0.03)


def test_levers_are_ordered_by_what_they_save() -> None:
    made = example("offline")
    saved = {name: made.value(f"{name}_saved") for name in ("reuse", "sorted", "batch", "fp8", "int4", "all")}
    assert saved["all"] > saved["sorted"] > saved["reuse"] > 0
    assert made.value("on_4_a100_80g_saved") < 0  # cheaper by the hour, dearer by the batch
    grid = made.sections[-1].entries[0].rows  # type: ignore[union-attr]
    order = [row[2].value for row in grid]  # type: ignore[union-attr]
    assert order == sorted(order, reverse=True)


def test_random_order_hits_as_many_groups_as_fit() -> None:
    made = example("offline")
    room = made.value("reuse_kv_tokens") - 32 * 3_150
    assert made.value("reuse_hits") == pytest.approx(room / (400 * 2_000) * (1 - 400 / 200_000))


def test_a_gpu_that_cannot_hold_the_model_is_no_lever() -> None:
    made = report(changed("offline", other_gpus=[{"gpu": "l4", "gpu_hour_dollars": 0.5}]))
    section = next(section for section in made.sections if section.title == "Lever: 1 x l4")
    assert "does not fit" in section.entries[-1].text  # type: ignore[union-attr]


# Memory


def test_block_waste_and_live_requests() -> None:
    made = example("memory")
    assert made.value("b16_missed") == 7.5
    assert made.value("b16_waste") == pytest.approx(7.5 / (12_400 + 7.5))
    assert made.value("live") == pytest.approx(made.value("kv_tokens") / 12_400)


def test_the_cache_that_a_trace_needs_grows_with_the_share() -> None:
    made = example("memory")
    needs = [made.value(f"need_{share}_tokens") for share in (50, 90, 99)]
    assert needs == sorted(needs)
    assert needs[0] < needs[-1] <= made.value("unique_tokens")
    assert made.value("one_of_ideal") < made.value("fleet_of_ideal") < 1


def test_a_traces_own_block_sizes_are_compared() -> None:
    made = report(changed("memory", trace="chats", block_tokens=[64, 128, 512]))
    ideals = [made.value(f"b{size}_ideal") for size in (64, 128, 512)]
    assert ideals == sorted(ideals, reverse=True)
    assert ideals[0] > ideals[-1] > 0


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(PlanError, match=r"trace: no file 'nowhere.jsonl'"):
        report(changed("memory", trace="nowhere.jsonl"))


# Tiers


def test_at_the_shortest_run_fetching_costs_what_computing_costs() -> None:
    made = example("tiers")
    for tier in ("host", "peer", "nvme", "object_store"):
        run = made.value(f"{tier}_run_min")
        compute_us = run * made.value("token_us") * (1 + run / 2 / made.value("attention_tokens"))
        fetch_us = run * made.value(f"{tier}_byte_us") + made.value(f"{tier}_latency_us")
        assert compute_us == pytest.approx(fetch_us)


def test_at_the_break_even_bandwidth_nothing_is_saved() -> None:
    gb_per_s = example("tiers").value("break_even_gb_per_s")
    tier = {"name": "edge", "gb_per_s": gb_per_s, "capacity_gb": 10}
    assert report(changed("tiers", tiers=[tier])).value("edge_saved_us") == pytest.approx(0, abs=1e-9)


def test_a_tier_that_loses_is_told_not_to_exist() -> None:
    made = example("tiers")
    assert made.value("object_store_ratio") < 1
    assert any(sentence.startswith("object store: should not exist") for sentence in made.answer)
    assert any(sentence.startswith("peer: fetch") and "6 share it" in sentence for sentence in made.answer)


def test_a_linear_replica_never_fetches_over_a_slow_link() -> None:
    replica = {"kind": "measured", "prefill_us_per_token": 32}
    slow = {"name": "slow", "gb_per_s": 1.0, "latency_us": 10, "capacity_gb": 10}
    made = report(changed("tiers", replica=replica, tiers=[slow]))
    assert made.value("slow_run_min") == float("inf")
    assert made.json_object()["sections"][2]["entries"]  # infinity is null in JSON
    fast = slow | {"gb_per_s": 100.0}
    made = report(changed("tiers", replica=replica, tiers=[fast]))
    assert made.value("slow_run_min") == pytest.approx(10 / (32 - 131_072 / 100 / 1e3))


def test_a_disk_lasts_as_long_as_its_write_budget() -> None:
    made = example("tiers")
    bytes_a_day = 4_000 * 131_072 * 1.2 * 86_400
    assert made.value("nvme_years") == pytest.approx(7_000e12 / bytes_a_day / 365)
    share = made.value("nvme_admit_share")
    assert 7_000e12 / (bytes_a_day * share) / 365 == pytest.approx(5)


def test_tiers_together_have_no_more_than_the_ideal() -> None:
    made = example("tiers")
    places = ("gpu", "host", "peer", "nvme", "object_store")
    assert sum(made.value(f"{place}_of_ideal") for place in places) == pytest.approx(1.0)


# Hybrid


def test_the_state_of_qwen3_next() -> None:
    made = example("hybrid")
    # 36 layers x (32 heads x 128 x 128 x 4 bytes + 8,192 channels x 3 inputs x 2 bytes)
    assert made.value("state_mb") == 36 * (32 * 128 * 128 * 4 + 8_192 * 3 * 2) / 1e6
    assert made.value("kv_bytes") == 12 * 2 * 2 * 256 * 2
    assert made.value("state_tokens") == made.value("state_mb") * 1e6 / 24_576


def test_checkpoints_crowd_out_what_they_are_for() -> None:
    made = example("hybrid")
    held = [made.value(f"at_{spacing}_cached_tokens") for spacing in (512, 2048, 4096, 8192)]
    assert held == sorted(held)
    even = made.value("even_spacing")
    halved = made.value("kv_gb") * 1e9 / (made.value("kv_bytes") + made.value("state_mb") * 1e6 / even)
    assert halved == pytest.approx(made.value("kv_tokens") / 2)


def test_a_model_without_a_state_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"llama-3\.1-8b has no recurrent layers; expected a model with a state"
    ):
        report(changed("hybrid", replica__model="llama-3.1-8b"))
