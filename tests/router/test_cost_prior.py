"""What work should cost by model and GPU, told or guessed, until the replica has shown enough itself."""

import pytest

from replica.contract.load_report import LoadReport
from replica.contract.roofline.first_cost import BATCHES, CONTEXT_TOKENS, first_cost
from replica.contract.roofline.roofline import PlainChunk, PlainStep, RooflineStepTime
from router.config import parse_config
from router.config_errors import ConfigError
from router.engines.metrics_page import MetricsPage
from router.engines.vllm import load
from router.proxy.explanation import explanation, lines
from router.proxy.fleet_config import make_fleet
from router.routing.calibration import DEFAULT_PREFILL
from router.routing.cost_prior import Hardware, cost_prior
from router.routing.fleet import Fleet
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import PRIOR_UNTIL
from tests.router.small_fleet import prefilled

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def fleet_of(cost: dict[str, object] | None = None, **replica: object) -> Fleet:
    one = {"url": "http://127.0.0.1:9000", **replica}
    if cost is not None:
        one["cost"] = cost
    return make_fleet(parse_config({"replicas": [one, {"url": "http://127.0.0.1:9001"}]}, "test"))


def ms(fleet: Fleet, replica: int = 0) -> float:
    return 1e3 * fleet.replicas[replica].cost.prefill_s(4_096, 0)


@pytest.mark.parametrize(
    ("model", "gpu"), [("llama-3.1-8b", "h100"), ("qwen3-32b", "h200"), ("qwen3-0.6b", "l4")]
)
def test_the_first_cost_is_the_rooflines(model: str, gpu: str) -> None:
    roofline = RooflineStepTime.of(model, gpu)
    prefill, decode = first_cost(roofline)
    for new, position in ((300, 0), (3_000, 0), (8_000, 0), (700, 12_000)):
        step = PlainStep(prefills=(PlainChunk(position, new, True),))
        assert prefill.seconds(new, position) == pytest.approx(roofline.seconds(step), rel=0.05)
    for count in BATCHES:
        step = PlainStep(count, count * CONTEXT_TOKENS)
        assert decode.step_seconds(count) == pytest.approx(roofline.seconds(step), rel=0.02)


def test_a_named_gpu_prices_the_replica_as_soon_as_its_model_is_known() -> None:
    fleet = fleet_of({"gpu": "h100"})
    assert ms(fleet) == pytest.approx(1e3 * DEFAULT_PREFILL.seconds(4_096), rel=1e-6)
    assert fleet.replicas[0].prior_source == "default"
    fleet.models_reported(0, frozenset({LLAMA}))
    assert ms(fleet) == pytest.approx(98.9, abs=0.1)
    assert fleet.replicas[0].prior_source == "llama-3.1-8b in bf16 on 1 x h100"
    assert ms(fleet, 1) == pytest.approx(1e3 * DEFAULT_PREFILL.seconds(4_096), rel=1e-6), (
        "the other says nothing"
    )
    assert ms(fleet_of({"gpu": "h100"}, model=LLAMA)) == ms(fleet), "from the start, if the config names it"
    two = fleet_of({"gpu": "h100", "gpus": 2, "model": "llama-3.1-8b"}, model="alias")
    assert 0.5 * ms(fleet) < ms(two) < 0.7 * ms(fleet)


def test_without_a_gpu_it_is_guessed_from_the_kv_capacity() -> None:
    fleet = fleet_of()
    fleet.models_reported(0, frozenset({LLAMA}))
    page = 'vllm:cache_config_info{block_size="16",gpu_memory_utilization="0.9",num_gpu_blocks="12100"} 1.0\n'
    report = load(MetricsPage(page))
    assert (report.capacity_tokens, report.memory_share) == (193_600, 0.9)
    fleet.load_reported(0, report, 0.0)
    assert fleet.replicas[0].prior_source == (
        "guess from 193,600 KV tokens: llama-3.1-8b in bf16 on 1 x l40s, 2 x rtx-4090"
    )
    slower, faster = (
        cost_prior(hardware, LLAMA) for hardware in (Hardware(gpu="l40s"), Hardware("rtx-4090", gpus=2))
    )
    assert slower is not None and faster is not None
    between = sorted(1e3 * prior.prefill.seconds(4_096) for prior in (slower, faster))
    assert between[0] < ms(fleet) < between[1]


@pytest.mark.parametrize(
    ("model", "capacity"), [("my-finetune", 193_600), (LLAMA, 5_000), (LLAMA, None), ("bamba-9b", 10)]
)
def test_what_cannot_be_known_keeps_the_default(model: str, capacity: int | None) -> None:
    fleet = fleet_of()
    fleet.models_reported(0, frozenset({model}))
    fleet.load_reported(0, LoadReport(capacity_tokens=capacity), 0.0)
    assert fleet.replicas[0].prior_source == "default"


@pytest.mark.parametrize("seen", [PRIOR_UNTIL - 1, PRIOR_UNTIL])
def test_after_50_requests_the_replica_itself_is_believed(seen: int) -> None:
    fleet = fleet_of({"gpu": "h100"})
    cost = fleet.replicas[0].cost
    for number in range(seen):
        prefilled(cost, number, number + 0.1, 1_000)
    fleet.models_reported(0, frozenset({LLAMA}))
    assert (fleet.replicas[0].prior_source == "default") == (seen >= PRIOR_UNTIL)


def test_the_operators_figures_are_never_replaced() -> None:
    fleet = fleet_of({"prefill_us_per_token": 10.0}, model=LLAMA)
    fleet.load_reported(0, LoadReport(capacity_tokens=193_600), 0.0)
    assert fleet.replicas[0].prior_source == "given" and ms(fleet) < 50


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        ({"gpu": "h101"}, "replicas.0.cost.gpu"),
        ({"gpu": "h101"}, "expected one of a100-80g"),
        ({"gpu": "h100", "precision": "bf8"}, "expected one of bf16"),
        ({"gpu": "h100", "model": "gpt-7"}, "expected a name of one of smollm2-135m"),
        ({"gpu": "h100", "decode_step_ms": 4}, "keep the one or the other"),
        ({"gpu": "a100-80g", "precision": "fp8", "model": "qwen3-8b"}, "a100-80g has no fp8 math"),
    ],
)
def test_a_wrong_word_is_an_error_that_says_so(cost: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"replicas": [{"url": "http://h:1", "cost": cost}]}, "the.yaml")
    assert says in str(caught.value) and "the.yaml" in str(caught.value)


def test_explain_shows_what_its_figures_are_made_of() -> None:
    fleet = fleet_of({"gpu": "h100", "model": "llama-3.1-8b"})
    for replica in fleet.replicas:
        fleet.probe_succeeded(replica.index, 0.0)
    prompt = Prompt(keys=list(range(1, 200)), units=400_000, stream=True)
    fleet.caches.text.insert(0, prompt.keys[:100])
    flight = fleet.sent(prompt, fleet.decide(prompt, 0.0), 0.0)
    fleet.first_token(flight, 9.0)  # not what was predicted: factors move
    shown = explanation(fleet, *fleet.explain(prompt, 9.0))
    for row in shown["candidates"]:
        cost, matched = row["cost"], row["matched_tokens"]
        new = shown["prompt_tokens"] - matched
        by_hand = cost["prefill_fixed_ms"] + 1e-3 * cost["prefill_us_per_token"] * new * (
            1 + (matched + new / 2) / cost["attention_tokens"]
        )
        assert row["prefill_ms"] == pytest.approx(by_hand, rel=1e-3)
        step = cost["decode_step_ms"] + 1e-3 * cost["decode_us_per_sequence"] * row["decoding"]
        assert row["step_ms"] == pytest.approx(step, rel=1e-3)
    assert shown["candidates"][0]["cost"] != shown["candidates"][1]["cost"]
    assert any(line.startswith("there: prefill ") for line in lines(shown))


def test_explain_says_of_equals_that_they_are() -> None:
    fleet = fleet_of()
    for replica in fleet.replicas:
        fleet.probe_succeeded(replica.index, 0.0)
    shown = lines(explanation(fleet, *fleet.explain(Prompt(keys=[1, 2], units=600), 0.0)))
    assert sum(line.endswith(" would be as good") for line in shown) == 1
    assert not any(line.startswith("against ") for line in shown)
