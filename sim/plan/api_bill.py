"""An API's bill with and without cached-input prices."""

from sim.plan.config import ApiBillPlan
from sim.plan.worksheet import Report, Worksheet


def plan_api_bill(plan: ApiBillPlan) -> Report:
    """The finished plan; there is nothing to simulate."""
    prices = plan.dollars_per_million
    sheet = Worksheet(plan.kind, plan.title or "API bill")
    sheet.section("Requests")
    sheet.given("requests", plan.requests, "requests", "in all", "plan")
    sheet.given("cached_tokens", plan.cached_tokens, "tokens", "of a prompt that can be cached", "plan")
    sheet.given("new_tokens", plan.new_tokens, "tokens", "of a prompt that are new", "plan")
    sheet.given("output_tokens", plan.output_tokens, "tokens", "of a reply", "plan")
    sheet.given("hit_share", plan.hit_share, "", "of requests find them cached", "plan")
    sheet.section("Prices")
    dollars = "dollars/M tokens"
    sheet.given("input_price", prices.input, dollars, "input", "plan")
    sheet.given("cached_price", prices.cached_input, dollars, "cached input", "plan")
    sheet.given("output_price", prices.output, dollars, "output", "plan")
    write = prices.input if prices.cache_write is None else prices.cache_write
    source = "plan" if prices.cache_write is not None else "the input price: writing costs nothing more"
    sheet.given("write_price", write, dollars, "input that is written to the cache", source)
    sheet.section("Without a cache")
    formula = "requests * (cached_tokens + new_tokens) * input_price / 1000000"
    sheet.line("full_input", formula, "dollars", "input")
    sheet.line("output", "requests * output_tokens * output_price / 1000000", "dollars", "output")
    without = sheet.line("without", "full_input + output", "dollars", "in all")
    sheet.section("With it")
    formula = "requests * hit_share * cached_tokens * cached_price / 1000000"
    sheet.line("hits", formula, "dollars", "cached input")
    formula = "requests * (1 - hit_share) * cached_tokens * write_price / 1000000"
    sheet.line("misses", formula, "dollars", "the same tokens where they were not cached")
    sheet.line("new_input", "requests * new_tokens * input_price / 1000000", "dollars", "new input")
    with_cache = sheet.line("with_cache", "hits + misses + new_input + output", "dollars", "in all")
    saved = sheet.line("saved_share", "1 - with_cache / without", "", "of the bill saved")
    says = "hit share below which the cache costs more than it saves"
    formula = "(write_price - input_price) / (write_price - cached_price)"
    sheet.line("break_even_hits", f"max(0, {formula})", "", says)
    sheet.conclude(
        f"{without:,.2f} dollars without cached-input prices, {with_cache:,.2f} with them: {saved:.0%} less."
    )
    return sheet.done()
