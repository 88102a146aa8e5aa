"""The keys of ``cost:`` in the router's YAML: what work is taken to cost until a replica has shown it."""

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.config_values import Section
from router.routing.calibration import DEFAULT_DECODE, DEFAULT_PREFILL


class CostConfig(Section):
    """A prior; ``warmroute calibrate`` measures it. What replicas do corrects its scale, not its shape.

    With the defaults a cold prompt of 3,300 tokens takes, in milliseconds:

    >>> round(1e3 * CostConfig().prefill.seconds(3_300), 1)
    215.6
    """

    prefill_fixed_ms: NonNegativeFloat = 1e3 * DEFAULT_PREFILL.fixed_s
    """Of every prefill, however short."""
    prefill_us_per_token: PositiveFloat = 1e6 * DEFAULT_PREFILL.per_token_s
    """Of every prompt token that is not cached."""
    attention_tokens: PositiveFloat = DEFAULT_PREFILL.attention_tokens
    """The position at which attention makes a token cost twice as much."""
    decode_step_ms: NonNegativeFloat = 1e3 * DEFAULT_DECODE.fixed_s
    """Of every decode step."""
    decode_us_per_sequence: NonNegativeFloat = 1e6 * DEFAULT_DECODE.per_sequence_s
    """Of every request that decodes in it."""

    @model_validator(mode="after")
    def _decoding_takes_time(self) -> "CostConfig":
        if not self.decode_step_ms and not self.decode_us_per_sequence:
            raise ValueError("decode_step_ms and decode_us_per_sequence are both 0; decoding takes time")
        return self

    @property
    def prefill(self) -> PrefillCost:
        """In seconds."""
        return PrefillCost(
            1e-3 * self.prefill_fixed_ms, 1e-6 * self.prefill_us_per_token, self.attention_tokens
        )

    @property
    def decode(self) -> DecodeCost:
        """In seconds."""
        return DecodeCost(1e-3 * self.decode_step_ms, 1e-6 * self.decode_us_per_sequence)
