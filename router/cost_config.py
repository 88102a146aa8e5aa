"""The keys of ``cost:`` in the router's YAML: what work is taken to cost until a replica has shown it."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_names import named_model
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.contract.roofline.roofline import RooflineStepTime
from router.config_values import Section
from router.routing.calibration import DEFAULT_DECODE, DEFAULT_PREFILL
from router.routing.cost_prior import Hardware

COST_FIGURES = (
    "prefill_fixed_ms",
    "prefill_us_per_token",
    "attention_tokens",
    "decode_step_ms",
    "decode_us_per_sequence",
)
_FIGURES = frozenset(COST_FIGURES)


def _gpu(value: str) -> str:
    if value not in GPUS:
        raise ValueError(
            f"expected one of {', '.join(GPUS)}; for any other GPU, warmroute calibrate measures"
        )
    return value


def _precision(value: str) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"expected one of {', '.join(PRECISIONS)}")
    return value


def _model(value: str) -> str:
    if named_model(value) is None:
        raise ValueError(f"expected a name of one of {', '.join(MODEL_SHAPES)}")
    return value


class CostConfig(Section):
    """A prior: figures, as ``warmroute calibrate`` measures them, or the GPU they follow from. With neither
    they are guessed from the model and the KV capacity that the engine tells, if it is a known one.

    With the default figures a cold prompt of 3,300 tokens takes, in milliseconds:

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

    gpu: Annotated[str, AfterValidator(_gpu)] | None = None
    """Of what kind each GPU is; instead of the figures."""
    gpus: PositiveInt = 1
    """How many share one replica (tensor parallel)."""
    precision: Annotated[str, AfterValidator(_precision)] | None = None
    """Of the weights; what the model's name says unless set."""
    model: Annotated[str, AfterValidator(_model)] | None = None
    """Which model it is, where the name it is served by does not say."""

    @model_validator(mode="after")
    def _one_source(self) -> "CostConfig":
        figures = sorted(self.model_fields_set & _FIGURES)
        hardware = sorted(self.model_fields_set - _FIGURES)
        if figures and hardware:
            raise ValueError(
                f"{', '.join(figures)} say what work costs, {', '.join(hardware)} what it runs on; "
                "keep the one or the other"
            )
        if self.gpu is not None and self.model is not None:
            found = named_model(self.model)
            assert found is not None
            precision = self.precision or found[1]
            RooflineStepTime.of(found[0], self.gpu, precision)  # ValueError: the GPU has no such math
        return self

    @model_validator(mode="after")
    def _decoding_takes_time(self) -> "CostConfig":
        if not self.decode_step_ms and not self.decode_us_per_sequence:
            raise ValueError("decode_step_ms and decode_us_per_sequence are both 0; decoding takes time")
        return self

    @model_serializer(mode="wrap")
    def _what_counts(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The figures or the hardware, so that what ``--check`` prints can be read again."""
        unused = _FIGURES if self.hardware is not None else CostConfig.model_fields.keys() - _FIGURES
        return {name: value for name, value in dump(self).items() if name not in unused}

    @property
    def hardware(self) -> Hardware | None:
        """What it runs on; ``None`` where figures say what work costs."""
        if self.model_fields_set & _FIGURES:
            return None
        return Hardware(self.gpu, self.gpus, self.precision, self.model)

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
