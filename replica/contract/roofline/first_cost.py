"""What a model's work should cost on a GPU, before anything was measured: the roofline as a cost model."""

from replica.contract.cost_fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from replica.contract.roofline.roofline import PlainChunk, PlainStep, RooflineStepTime

STEP_TOKENS = 8_192
"""Of a longer prompt so many tokens go into one step (vLLM's default for servers)."""
PREFILLS = (
    (256, 0), (512, 0), (1_024, 0), (2_048, 0), (4_096, 0), (8_192, 0), (16_384, 0), (32_768, 0),
    (256, 8_192), (1_024, 16_384), (2_048, 32_768),
)  # fmt: skip
"""(new tokens, position) that the cost is fitted to."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = 2_000
"""Of each sequence in them."""


def first_cost(roofline: RooflineStepTime) -> tuple[PrefillCost, DecodeCost]:
    """The costs nearest to ``roofline``, within 2% of it.

    >>> prefill, decode = first_cost(RooflineStepTime.of("llama-3.1-8b", "h100"))
    >>> round(1e3 * prefill.seconds(4_096)), round(1e3 * decode.step_seconds(16), 1)
    (99, 9.2)
    """
    prefill, _ = fit_prefill([PrefillPoint(new, at, _prefill_s(roofline, new, at)) for new, at in PREFILLS])
    decode, _ = fit_decode(
        [DecodePoint(count, roofline.seconds(PlainStep(count, count * CONTEXT_TOKENS))) for count in BATCHES]
    )
    return prefill, decode


def _prefill_s(roofline: RooflineStepTime, new_tokens: int, position: int) -> float:
    seconds = 0.0
    for start in range(0, new_tokens, STEP_TOKENS):
        count = min(STEP_TOKENS, new_tokens - start)
        chunk = PlainChunk(position + start, count, start + count == new_tokens)
        seconds += roofline.seconds(PlainStep(prefills=(chunk,)))
    return seconds
