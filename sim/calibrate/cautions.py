"""What has to be said about a fit of measured times: parts that came out as nothing, points that disagree."""

from replica.contract.cost_fit import LEAST_PER_TOKEN_S, NO_ATTENTION_TOKENS, FitError
from replica.contract.prefill_cost import DecodeCost, PrefillCost

MOST_MEAN_ERROR = 0.15
"""Of a fit that nothing has to be said about."""


def cautions(
    prefill: PrefillCost, prefill_error: FitError, decode: DecodeCost, decode_error: FitError
) -> list[str]:
    """What in a fit is no measurement: parts that came out as nothing, and points that disagree.

    >>> error = FitError(mean=0.02, worst=0.05)
    >>> cautions(PrefillCost(0.004, 31e-6, 64_000.0), error, DecodeCost(0.008, 60e-6), error)
    []
    >>> for one in cautions(PrefillCost(0.0, 31e-6, 1e9), FitError(0.3, 0.8), DecodeCost(0.008, 0.0), error):
    ...     print(one)
    prefill_fixed_ms came out as 0: short prompts cost no more than their tokens here, or were lost in noise
    attention_tokens came out as none: prompts were too short, or too noisy, to show what attention costs
    decode_us_per_sequence came out as 0: batches were too small, or too noisy, to show what a sequence costs
    prefill: the fit is off by 30% in the mean; something else was running, or more --repeats are needed
    """
    made = []
    if prefill.fixed_s == 0.0:
        made.append(
            "prefill_fixed_ms came out as 0: short prompts cost no more than their tokens here, or were lost "
            "in noise"
        )
    if prefill.per_token_s <= LEAST_PER_TOKEN_S:
        made.append("prefill_us_per_token came out as nothing: prompts were too short to show it")
    if prefill.attention_tokens >= NO_ATTENTION_TOKENS:
        made.append(
            "attention_tokens came out as none: prompts were too short, or too noisy, to show what attention "
            "costs"
        )
    if decode.fixed_s == 0.0:
        made.append("decode_step_ms came out as 0: steps grew with the batch alone, or were lost in noise")
    if decode.per_sequence_s == 0.0:
        made.append(
            "decode_us_per_sequence came out as 0: batches were too small, or too noisy, to show what a "
            "sequence costs"
        )
    for what, error in (("prefill", prefill_error), ("decode", decode_error)):
        if error.mean > MOST_MEAN_ERROR:
            made.append(
                f"{what}: the fit is off by {error.mean:.0%} in the mean; something else was running, or "
                "more --repeats are needed"
            )
    return made
