"""Every engine, on samples of what it says: it is recognized, its load is read, and what its cache spared."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract.load_report import LoadReport
from router.config import parse_config
from router.config_errors import ConfigError
from router.engines import ENGINES
from router.engines.metrics_page import MetricsPage
from router.proxy.engine_reader import EngineReader
from router.proxy.stream_watch import JsonWatch, StreamWatch
from router.replica_config import ReplicaTraits
from router.routing.in_flight import Usage

SAMPLES = Path(__file__).parent / "samples"
KINDS = sorted(ENGINES)

LOADS = {
    "vllm": LoadReport(
        "vllm", 0, 0, 0.0, 12_200.0, 1_920.0, 3_840, 0.92, block_size=32, hash_algorithm="sha256"
    ),
    "warmroute": LoadReport(
        "warmroute", 0, 0, 0.0, 0.0, 0.0, 65_536, block_size=16, hash_algorithm="warmroute"
    ),
    "sglang": LoadReport("sglang", 162, 2_826, 0.28, 8_128_902.0, 61_028.0, 20_480, block_size=1),
    "llamacpp": LoadReport("llamacpp", 4, 46, capacity_tokens=1_024),
    "tgi": LoadReport("tgi", 4, 7),
    "openai": LoadReport("openai"),
}
USAGES = {
    "vllm": [Usage(499, 5, 480)],
    "warmroute": [Usage(21, 4, 0)],
    "sglang": [Usage(300, 2, 256)],
    "llamacpp": [Usage(44, 48, 0), Usage(237, 35, 236)],
    "tgi": [Usage(9, 2, None)],
    "openai": [Usage(2_006, 10, 1_920)],
}


def sample(kind: str, name: str) -> bytes | None:
    path = SAMPLES / kind / name
    return path.read_bytes() if path.exists() else None


def pages(kind: str) -> dict[str, bytes]:
    """What the engine answers, by path."""
    found = {"/v1/models": sample(kind, "models.json"), "/metrics": sample(kind, "metrics.txt")}
    for path in ENGINES[kind].info_paths[-1:]:  # the last: those before are names of other versions
        found[path] = sample(kind, "info.json")
    return {path: body for path, body in found.items() if body is not None}


class Server:
    """Answers from ``pages``; what was asked is noted."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self.pages = dict(pages)
        self.asked: list[str] = []

    async def read(self, path: str) -> bytes | None:
        self.asked.append(path)
        return self.pages.get(path)


def read(server: Server, kind: str = "auto") -> tuple[EngineReader, frozenset[str], LoadReport | None]:
    reader = EngineReader(kind, server.read)

    async def main() -> tuple[frozenset[str], LoadReport | None]:
        return await reader.models(), await reader.load(again=True)

    models, report = asyncio.run(main())
    return reader, models, report


def test_the_table_and_the_config_have_the_same_kinds() -> None:
    assert set(get_args(ReplicaTraits.model_fields["kind"].annotation)) == {"auto", *ENGINES}
    assert {path.name for path in SAMPLES.iterdir() if path.is_dir()} == set(ENGINES)


@pytest.mark.parametrize("kind", KINDS)
def test_its_load_is_read_when_its_kind_is_given(kind: str) -> None:
    _, models, report = read(Server(pages(kind)), kind)
    listed = json.loads(pages(kind)["/v1/models"])["data"]
    assert models == {one["id"] for one in listed} and models
    assert report == LOADS[kind]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "openai"])
def test_auto_finds_it_out(kind: str) -> None:
    reader, _, report = read(Server(pages(kind)))
    assert reader.engine is ENGINES[kind] and report == LOADS[kind]


@pytest.mark.parametrize("kind", ["vllm", "warmroute", "sglang", "llamacpp"])
def test_auto_finds_it_out_without_metrics(kind: str) -> None:
    """SGLang and llama.cpp have them only if they were started so."""
    server = Server({path: body for path, body in pages(kind).items() if path != "/metrics"})
    reader, _, report = read(server)
    assert reader.engine is ENGINES[kind]
    assert report is not None and (report.running, report.capacity_tokens) == (
        None,
        LOADS[kind].capacity_tokens if ENGINES[kind].info_paths else None,
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "tgi"])
def test_auto_finds_it_out_behind_a_name_of_the_operators(kind: str) -> None:
    renamed = {"object": "list", "data": [{"id": "m", "owned_by": "acme"}]}
    reader, _, report = read(Server(pages(kind) | {"/v1/models": json.dumps(renamed).encode()}))
    assert reader.engine is ENGINES[kind] and report == LOADS[kind]


def test_tgi_that_has_served_nothing_yet_is_known_by_its_info() -> None:
    reader, _, report = read(Server(pages("tgi") | {"/metrics": b""}))
    assert reader.engine is ENGINES["tgi"] and report == LoadReport("tgi")


def test_any_other_server_stays_unknown_and_is_not_asked_at_every_probe() -> None:
    server = Server(pages("openai"))
    reader, models, report = read(server)
    assert reader.engine is None and models == {"gpt-4o", "gpt-4o-mini"} and report is None
    server.asked.clear()
    assert asyncio.run(reader.load(again=False)) is None and server.asked == ["/metrics"]


def test_another_engine_at_the_same_address_is_noticed() -> None:
    server = Server(pages("vllm"))
    reader, _, _ = read(server)
    server.pages = pages("sglang")

    async def main() -> LoadReport | None:
        await reader.models()
        return await reader.load(again=True)

    assert asyncio.run(main()) == LOADS["sglang"]


def test_a_size_that_was_told_once_is_kept_while_its_page_does_not_answer() -> None:
    server = Server(pages("sglang"))
    reader, _, _ = read(server)
    del server.pages["/get_server_info"]
    assert asyncio.run(reader.load(again=True)) == LOADS["sglang"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_cache_spared_is_read_from_its_answers(kind: str) -> None:
    found: list[Usage | None] = []
    for name, watch in (("answer.json", JsonWatch()), ("stream.sse", StreamWatch())):
        body = sample(kind, name)
        if body is not None:
            watch.pieces.append(body)
            watch.grew(len(body))
            found.append(watch.usage())
            if isinstance(watch, StreamWatch):
                assert watch.first_token and watch.ended_properly
    assert found == USAGES[kind]


def test_llama_cpp_between_versions_has_a_usage_without_details_beside_its_timings() -> None:
    answer = {
        "usage": {"prompt_tokens": 237, "completion_tokens": 35},
        "timings": {"cache_n": 236, "prompt_n": 1},
    }
    watch = JsonWatch()
    watch.pieces.append(json.dumps(answer).encode())
    assert watch.usage() == Usage(237, 35, 236)


@pytest.mark.parametrize("kind", KINDS)
def test_kv_events_are_for_those_that_publish_them(kind: str) -> None:
    replica = {"url": "http://10.0.0.1:1", "kind": kind, "kv_events": "tcp://10.0.0.1:5557"}
    if ENGINES[kind].publishes_kv_events:
        assert parse_config({"replicas": [replica]}, "test").replicas[0].kv_events is not None
    else:
        with pytest.raises(ConfigError, match=rf"kv_events: .*kind: {kind}\) publishes none"):
            parse_config({"replicas": [replica]}, "test")


HOSTILE = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            "data": st.just([{"id": 1, "owned_by": []}]),
            "max_total_num_tokens": st.integers(),
            "default_generation_settings": st.integers(),
            "total_slots": st.text(),
        },
    ).map(lambda value: json.dumps(value).encode()),
)


@pytest.mark.parametrize("kind", ["auto", *KINDS])
@given(bodies=st.fixed_dictionaries(dict.fromkeys(("/v1/models", "/metrics", "/props", "/info"), HOSTILE)))
def test_whatever_it_answers_is_a_report_of_plausible_figures(kind: str, bodies: dict[str, bytes]) -> None:
    _, _, report = read(Server(bodies), kind)
    if report is not None:
        for field in fields(LoadReport):
            value: Any = getattr(report, field.name)
            assert value is None or type(value) is str or value >= 0 or field.name == "running", field.name


def test_metrics_in_the_shapes_that_engines_use() -> None:
    ranks = MetricsPage('sglang:token_usage{dp_rank="0"} 0.2\nsglang:token_usage{dp_rank="1"} 0.6\n')
    assert ENGINES["sglang"].load(ranks).kv_usage == pytest.approx(0.4)
    load: Callable[[MetricsPage], LoadReport] = ENGINES["vllm"].load
    assert load(MetricsPage("vllm:gpu_cache_usage_perc 0.5")).kv_usage == 0.5, "its name up to 0.10"
    assert load(MetricsPage("vllm:num_requests_running NaN\n\0\xff{")) == LoadReport()


GAUGES = {
    "vllm": (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
    ),
    "sglang": ("num_running_reqs", "num_queue_reqs", "token_usage", "max_total_num_tokens", "page_size"),
    "llamacpp": ("requests_processing", "requests_deferred", "kv_cache_usage_ratio"),
    "tgi": ("batch_current_size", "queue_size"),
}
HUGE = "9" * 5_000


@pytest.mark.parametrize("value", ["NaN", "-Inf", "+Inf", "-5", "1e300", "1e19", HUGE])
@pytest.mark.parametrize("kind", sorted(GAUGES))
def test_a_gauge_with_a_value_that_cannot_be_is_not_told(kind: str, value: str) -> None:
    page = "".join(f"{ENGINES[kind].metric_prefix}{name} {value}\n" for name in GAUGES[kind])
    _, _, report = read(Server({"/metrics": page.encode()}), kind)
    assert report == LoadReport(kind)


def test_many_gauges_that_each_may_be_do_not_add_up_to_one_that_cannot() -> None:
    page = "".join(f'vllm:num_requests_waiting{{rank="{rank}"}} {1 << 50}\n' for rank in range(9_000))
    assert ENGINES["vllm"].load(MetricsPage(page)).waiting is None


@pytest.mark.parametrize("blocks", ["-1", "x", "²", "0", "99999999999999999999", HUGE])
def test_a_cache_of_a_size_that_cannot_be_is_not_told(blocks: str) -> None:
    page = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    assert ENGINES["vllm"].load(MetricsPage(page)).capacity_tokens is None
    most = (1 << 50) - 1
    for kind, info in {
        "sglang": {"max_total_num_tokens": most, "dp_size": most},
        "llamacpp": {"default_generation_settings": {"n_ctx": most}, "total_slots": most},
    }.items():
        assert ENGINES[kind].info(info).capacity_tokens is None
