"""Every key of a plan's YAML: default, unit, limits. One class per kind of plan; unknown keys are errors."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from router.routing.policies import POLICIES
from sim.plan.replica_config import (
    NamedGpu,
    NamedPrecision,
    PlanSection,
    PositiveShare,
    Rate,
    ReplicaPlan,
    RooflineReplica,
    Share,
    one_of,
)


class NumbersTraffic(PlanSection):
    """Requests as averages."""

    kind: Literal["numbers"]
    requests_per_s: Rate
    prompt_tokens: PositiveInt
    shared_tokens: NonNegativeInt = 0
    """Leading tokens of a prompt that a warm replica holds."""
    warm_share: Share = 1.0
    """Of requests that find them there: how good routing and capacity are."""
    prefixes: PositiveInt = 64
    """Different shared prefixes in circulation."""
    zipf: NonNegativeFloat = 1.0
    """Popularity of the k-th prefix is proportional to ``1 / k ** zipf``."""
    output_tokens: PositiveInt
    spread: Annotated[float, Field(ge=0, le=2)] = 0.5
    """Standard deviation of the logarithm of a request's new tokens and of its reply's."""

    @model_validator(mode="after")
    def _fits(self) -> "NumbersTraffic":
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(
                f"shared_tokens {self.shared_tokens} of a prompt of {self.prompt_tokens}: the last token is "
                "always computed, expected fewer"
            )
        return self


class TraceTraffic(PlanSection):
    """Requests of a trace: its averages and its ideal hit rate."""

    kind: Literal["trace"]
    trace: str
    """A file, ``mooncake`` or ``chats``."""
    rate: PositiveFloat = 1.0
    """Times as fast as recorded; sessions: starts per second."""
    requests: PositiveInt | None = None
    """Only the first so many."""
    of_ideal: PositiveShare = 0.9
    """Share of the ideal hit rate that routing and capacity reach."""


TrafficPlan = Annotated[NumbersTraffic | TraceTraffic, Field(discriminator="kind")]


class SloPlan(PlanSection):
    """What is promised, as in the router's config."""

    ttft_ms: PositiveFloat = 1_000.0
    """Allowed on top of the prompt's own cold prefill."""
    tpot_ms: PositiveFloat = 50.0
    share: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of requests that must have their first token in time."""


def _policy(name: str) -> str:
    return one_of("policy", name, POLICIES)


class SimulatePlan(PlanSection):
    """How the answer is tried."""

    requests: Annotated[int, Field(ge=50, le=1_000_000)] = 2_000
    policy: Annotated[str, AfterValidator(_policy)] = "predicted_finish"
    seed: int = 1


class OnlinePlan(PlanSection):
    """Users wait: replicas and dollars for a latency promise."""

    kind: Literal["online"]
    title: str | None = None
    replica: ReplicaPlan
    traffic: TrafficPlan
    slo: SloPlan = SloPlan()
    gpu_hour_dollars: NonNegativeFloat
    max_utilization: PositiveShare = 0.8
    """Of a replica's time, whatever latency would allow: room for bursts and a lost replica."""
    simulate: SimulatePlan | None = SimulatePlan()


class LongPromptsPlan(PlanSection):
    """Long prompts on a few GPUs: does one fit, how warm must they be, two pools."""

    kind: Literal["long_prompts"]
    title: str | None = None
    replica: RooflineReplica
    """``gpus`` are all there are."""
    prefill_gpus: PositiveInt
    """Of one prefill replica."""
    decode_gpus: PositiveInt
    """Of one decode replica."""
    requests_per_s: Rate
    prompt_tokens: PositiveInt
    shared_tokens: NonNegativeInt = 0
    warm_share: Share = 1.0
    prefixes: PositiveInt = 8
    """Different shared prefixes in circulation."""
    zipf: NonNegativeFloat = 1.0
    """Popularity of the k-th prefix is proportional to ``1 / k ** zipf``."""
    output_tokens: PositiveInt
    ttft_target_ms: PositiveFloat = 2_000.0
    """From arrival to first token, prefill included."""
    tpot_ms: PositiveFloat = 50.0
    queue_share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Of the TTFT target that is kept for waiting."""
    in_time_share: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of requests that may not wait longer."""
    transfer_gb_per_s: PositiveFloat = 50.0
    """From a prefill replica to a decode replica; 50 is 400 Gbit/s."""
    gpu_hour_dollars: NonNegativeFloat = 0.0
    max_utilization: PositiveShare = 0.8
    simulate: SimulatePlan | None = SimulatePlan(requests=500)

    @model_validator(mode="after")
    def _fits(self) -> "LongPromptsPlan":
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(f"shared_tokens {self.shared_tokens}: expected fewer than prompt_tokens")
        if self.prefill_gpus + self.decode_gpus > self.replica.gpus:
            raise ValueError(
                f"prefill_gpus {self.prefill_gpus} and decode_gpus {self.decode_gpus} do not fit into "
                f"replica.gpus {self.replica.gpus}"
            )
        return self


class OtherGpu(PlanSection):
    """A GPU to compare with."""

    gpu: NamedGpu
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    gpu_hour_dollars: PositiveFloat


class OfflinePlan(PlanSection):
    """A batch with a deadline and no latency target."""

    kind: Literal["offline"]
    title: str | None = None
    replica: RooflineReplica
    requests: PositiveInt
    prompt_tokens: PositiveInt
    shared_tokens: NonNegativeInt = 0
    """Leading tokens that all requests of a group have in common."""
    groups: PositiveInt = 1
    """Different shared prefixes."""
    output_tokens: PositiveInt
    deadline_h: PositiveFloat
    gpu_hour_dollars: PositiveFloat
    running: PositiveInt = 32
    """Sequences decoding at once as things are."""
    sorted_by_prefix: bool = False
    """Whether requests come group by group as things are."""
    reuse: bool = False
    """Whether the prefix cache is on as things are."""
    precisions: tuple[NamedPrecision, ...] = ("fp8", "int4")
    """To compare with."""
    other_gpus: tuple[OtherGpu, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> "OfflinePlan":
        if self.shared_tokens >= self.prompt_tokens:
            raise ValueError(f"shared_tokens {self.shared_tokens}: expected fewer than prompt_tokens")
        return self


class MemoryPlan(PlanSection):
    """What KV takes, and how much cache a trace needs."""

    kind: Literal["memory"]
    title: str | None = None
    replica: RooflineReplica
    replicas: PositiveInt = 1
    sequence_tokens: PositiveInt
    """Prompt and reply of a live request, mean."""
    block_tokens: tuple[PositiveInt, ...] = (1, 16, 32, 64, 128, 256, 512)
    trace: str | None = None
    requests: PositiveInt | None = None
    of_ideal: tuple[PositiveShare, ...] = (0.5, 0.9, 0.99)


class TierPlan(PlanSection):
    """A place where KV can wait: host memory, a disk, a peer's memory, a store in the network."""

    name: str
    gb_per_s: PositiveFloat
    """Read into the GPU, as one replica sees it."""
    latency_us: NonNegativeFloat = 0.0
    """Of one fetch, however many tokens."""
    capacity_gb: PositiveFloat
    """Of one replica's share."""
    shared_by: PositiveInt = 1
    """Replicas that read over the same link at the same time, at worst."""
    endurance_tb: PositiveFloat | None = None
    """Bytes that may be written in a disk's life (its TBW), in terabytes."""
    write_amplification: Annotated[float, Field(ge=1)] = 1.2
    dollars_per_month: NonNegativeFloat = 0.0


class TiersPlan(PlanSection):
    """Fetch or recompute, tier by tier."""

    kind: Literal["tiers"]
    title: str | None = None
    replica: ReplicaPlan
    run_tokens: PositiveInt
    """Tokens of one hit, mean: one contiguous fetch."""
    new_tokens_per_s: NonNegativeFloat
    """KV that one replica computes, and could write."""
    lifetime_years: PositiveFloat = 5.0
    tiers: Annotated[tuple[TierPlan, ...], Field(min_length=1)]
    """From the nearest to the farthest."""
    trace: str | None = None
    requests: PositiveInt | None = None
    gpu_hour_dollars: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _names_unique(self) -> "TiersPlan":
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: names must differ, got {', '.join(names)}")
        return self


class HybridPlan(PlanSection):
    """A model with recurrent layers: what it keeps, and how far apart checkpoints should stand."""

    kind: Literal["hybrid"]
    title: str | None = None
    replica: RooflineReplica
    context_tokens: PositiveInt
    """Of a live request."""
    turn_tokens: PositiveInt
    """New tokens per turn: distance between places where a later request may continue."""
    spacings: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (256, 1_024, 4_096, 16_384)
    """Tokens between checkpoints, to compare."""


class ApiPrices(PlanSection):
    """Dollars per million tokens."""

    input: NonNegativeFloat
    cached_input: NonNegativeFloat
    output: NonNegativeFloat
    cache_write: NonNegativeFloat | None = None
    """For tokens that are written to the cache; the input price unless set."""


class ApiBillPlan(PlanSection):
    """What an API costs with and without cached-input prices."""

    kind: Literal["api_bill"]
    title: str | None = None
    requests: PositiveInt
    cached_tokens: NonNegativeInt
    """Leading tokens of a prompt that can be cached."""
    new_tokens: NonNegativeInt
    output_tokens: NonNegativeInt
    hit_share: Share = 1.0
    """Of requests that find the leading tokens cached."""
    dollars_per_million: ApiPrices


class ConversationPlan(PlanSection):
    """A chat of several turns: prefill with a cache, without, and when old turns are trimmed."""

    kind: Literal["conversation"]
    title: str | None = None
    system_tokens: NonNegativeInt
    user_tokens: PositiveInt
    reply_tokens: PositiveInt
    turns: Annotated[int, Field(ge=2, le=1_000)]
    block_tokens: PositiveInt = 16
    prefill_us_per_token: PositiveFloat = 32.0


class SheetLine(PlanSection):
    """One quantity of an arithmetic sheet: given, or computed from those above it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
    value: float | None = None
    formula: str | None = None
    """Python's notation; + - * / // **, min, max, ceil, floor, sqrt, exp, ln, erlang_c."""
    unit: str = ""
    says: str
    """What it is."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "SheetLine":
        if (self.value is None) == (self.formula is None):
            raise ValueError(f"line {self.name}: expected either value or formula")
        return self


class SheetSection(PlanSection):
    """Lines under a title."""

    title: str
    lines: Annotated[tuple[SheetLine, ...], Field(min_length=1)]


class ArithmeticPlan(PlanSection):
    """A sheet of your own."""

    kind: Literal["arithmetic"]
    title: str | None = None
    sections: Annotated[tuple[SheetSection, ...], Field(min_length=1)]
    answer: tuple[str, ...] = ()
    """Sentences at the end."""


PlanConfig = Annotated[
    OnlinePlan
    | LongPromptsPlan
    | OfflinePlan
    | MemoryPlan
    | TiersPlan
    | HybridPlan
    | ApiBillPlan
    | ConversationPlan
    | ArithmeticPlan,
    Field(discriminator="kind"),
]
