"""Numbers published elsewhere come out as published."""

import pytest

from tests.sim.plan_examples import changed, example, report


def test_a_prompt_of_3300_tokens_with_2900_shared_at_32_us() -> None:
    made = example("online_measured")
    assert round(made.value("cold_ms"), 1) == 105.6
    assert round(made.value("warm_ms"), 1) == 12.8
    assert made.value("new_tokens") == 400


def test_a_thousand_requests_at_an_api_with_cached_input_prices() -> None:
    made = example("api_bill")
    assert round(made.value("without"), 2) == 2.42
    assert round(made.value("with_cache"), 2) == 1.19
    assert made.answer[0] == "2.42 dollars without cached-input prices, 1.19 with them: 51% less."


def test_a_chat_of_six_turns() -> None:
    made = example("conversation", simulated=True)
    assert made.value("cold_tokens") == 12_600
    assert made.value("warm_tokens") == 1_640
    assert made.value("simulated_tokens") == 1_640  # by the replica's own scheduler and cache
    assert made.value("trimmed_new") == pytest.approx(2_100, rel=0.01)
    assert made.value("simulated_trimmed_tokens") == made.value("trimmed_new")


def test_a_hit_rate_of_three_quarters_speeds_prefill_up_four_times_at_best() -> None:
    plan = changed("online_measured", traffic__prompt_tokens=4000, traffic__shared_tokens=3000)
    assert report(plan).value("speedup_bound") == 4.0


@pytest.mark.parametrize(("block_tokens", "tokens"), [(1, 1_605), (16, 1_640), (100, 1_600 + 5 * 100)])
def test_block_size_decides_what_a_turn_computes_again(block_tokens: int, tokens: int) -> None:
    # Blocks of 1: 100 new tokens and the last of the reply. Of 100: that one token costs a whole block.
    made = report(changed("conversation", block_tokens=block_tokens), simulated=True)
    assert made.value("warm_tokens") == tokens
    assert made.value("simulated_tokens") == tokens


def test_a_write_price_above_the_input_price_needs_hits_to_pay() -> None:
    plan = changed("api_bill", hit_share=0.0)
    plan["dollars_per_million"]["cache_write"] = 0.6875  # 1.25 times input
    made = report(plan)
    assert made.value("with_cache") > made.value("without")
    needed = made.value("break_even_hits")
    assert 0.2 < needed < 0.3
    plan["hit_share"] = needed
    made = report(plan)
    assert made.value("with_cache") == pytest.approx(made.value("without"))
