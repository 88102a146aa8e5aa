"""The replica's config: defaults, files, flags, and messages that say what to do."""

import argparse
import asyncio
from pathlib import Path

import pytest
import yaml

from replica.config import ConfigError, ReplicaConfig, load_config, parse_config
from replica.kv_cache.eviction_order import TailOptimised
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_events_config import KvEventsConfig
from replica.server.replica_command import effective_config, run
from tests.replica.serving import get, replica


def _args(
    config: str | None = None, model: str | None = None, listen: str | None = None
) -> argparse.Namespace:
    return argparse.Namespace(config=config, model=model, listen=listen)


def test_a_model_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "replica.yaml"
    file.write_text("model: smollm2\n")
    config = load_config(file)
    assert config == ReplicaConfig(model="smollm2")
    assert config.address == ("127.0.0.1", 8000)
    assert config.kv_blocks(46_080) == 4096
    assert ReplicaConfig(model="x", listen="[::1]:80").address == ("::1", 80)
    assert ReplicaConfig(model="x", kv_tokens=100, block_size=32).kv_blocks(1) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; expected at least `model: smollm2`"),
        ("- a", "expected a mapping"),
        ("model: [", "not valid YAML: line 1"),
        ("model: tiny\nseed: 1\nmodel: x", "line 3: the key 'model' is given twice, first in line 1"),
        ("listen: 127.0.0.1:1", "model: Field required"),
        ("model: tiny\nkv_token: 5", "line 2: kv_token: unknown key, is it kv_tokens\\?"),
        ("model: tiny\nblok_size: 8", "line 2: blok_size: unknown key, is it block_size\\?"),
        ("model: tiny\ncache: radix", "line 2: cache: expected keys .*`cache: {kind: radix}`"),
        ("model: tiny\nlisten: 8000", "listen"),
        ("model: tiny\nlisten: localhost", "expected HOST:PORT, got 'localhost'"),
        ("model: tiny\ndtype: fp8", r"dtype: .*'fp32' or 'bf16' \(got 'fp8'\)"),
        ("model: tiny\nkv_tokens: 0", "kv_tokens: .*greater than 0"),
        ("model: tiny\nkv_tokens: 5", "less than one block of 16 tokens"),
        (
            "model: tiny\nkv_events: here",
            "kv_events.endpoint: expected tcp://HOST:PORT or ipc:///path, got 'here'",
        ),
        ("model: tiny\nkv_events: {replay: 'tcp://*:1'}", "kv_events.endpoint: Field required"),
        ("model: tiny\nkv_events: {endpoint: 'tcp://*:1', topics: x}", "kv_events.topics: .*unknown key"),
        (
            "model: tiny\nprefix_caching: false\nkv_events: 'tcp://*:1'",
            "kv_events .*has nothing to do",
        ),
        ("model: tiny\ncache: {kind: tree}", r"cache.kind: .*'blocks' or 'radix' \(got 'tree'\)"),
        ("model: tiny\ncache: {eviction: slru}", "cache: page_size and eviction .* set kind to radix"),
        (
            "model: tiny\ncache: {kind: radix, page_size: 3}",
            "block_size 16 is no multiple of cache.page_size 3",
        ),
        ("model: tiny\ncache: {kind: radix, eviction: tlru}", "cache: eviction order tlru with a slack of 0"),
        ("model: tiny\ncache: {kind: radix, tail_slack_tokens: 9}", "cache: tail_slack_tokens is for .*tlru"),
        ("model: tiny\ncache: {pins: 9}", "cache.pins: .*unknown key"),
        ("model: tiny\ntiers: {}", "tiers: no tier: give host_mib, or disk_path and disk_mib"),
        ("model: tiny\ntiers: {disk_path: /x}", "tiers: disk_path and disk_mib belong together"),
        ("model: tiny\ntiers: {host_gib: 1}", "tiers.host_gib: .*unknown key"),
        ("model: tiny\nprefix_caching: false\ntiers: {host_mib: 1}", "tiers .*has nothing to do"),
        ("model: tiny\nmax_running: 600", "max_batched_tokens 512 is less than max_running 600"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "replica.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_events_are_listened_for_where_the_host_is_concrete() -> None:
    def binds(endpoint: str, **keys: bool) -> bool:
        events = parse_config({"model": "tiny", "kv_events": {"endpoint": endpoint} | keys}, "x").kv_events
        assert events is not None
        return events.binds

    assert [binds(f"tcp://{host}:5557") for host in ("*", "0.0.0.0", "[::]", "10.0.0.1")] == [True] * 3 + [
        False
    ]
    assert (
        binds("ipc:///tmp/x")
        and binds("tcp://10.0.0.1:5557", bind=True)
        and not binds("tcp://*:1", bind=False)
    )
    assert parse_config({"model": "tiny", "kv_events": "tcp://*:1"}, "x").kv_events == KvEventsConfig(
        endpoint="tcp://*:1"
    )


def test_flags_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "replica.yaml"
    file.write_text("model: smollm2\nkv_tokens: 512\n")
    config = effective_config(_args(str(file), "tiny", "127.0.0.1:9"))
    assert (config.model, config.listen, config.kv_tokens) == ("tiny", "127.0.0.1:9", 512)
    assert effective_config(_args(model="tiny")) == ReplicaConfig(model="tiny")


def test_the_command_returns_2_for_arguments_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_args()) == 2
    assert "--model smollm2" in capsys.readouterr().err
    assert run(_args("/nowhere.yaml")) == 2
    assert "/nowhere.yaml: cannot be read" in capsys.readouterr().err
    assert run(_args(model="/nowhere")) == 2


def test_a_frozen_config() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config({"model": "tiny"}, "x").model = "y"  # type: ignore[misc]


def test_the_config_chooses_the_cache_and_the_scheduler() -> None:
    """From YAML to the running engine; block size and count in the metrics whatever the page."""
    text = """
model: tiny
kv_tokens: 1024
max_chunk_tokens: 64
longest_prefix_first: true
max_overtaken: 3
shares_prefills: false
cache: {kind: radix, page_size: 2, eviction: tlru, tail_slack_tokens: 32, pinned_tokens: 128}
"""

    async def scenario() -> None:
        async with replica(**(yaml.safe_load(text))) as running:
            scheduler = running.engine._engine._scheduler
            cache = scheduler.cache
            assert isinstance(cache, RadixCache)
            assert (cache.blocks, cache.block_size, cache.hash_tokens) == (512, 2, 16)
            assert cache.tree._leaves._order == TailOptimised(16)
            limits = scheduler.limits
            assert (limits.max_chunk_tokens, limits.longest_prefix_first, limits.max_overtaken) == (
                64,
                True,
                3,
            )
            assert not limits.shares_prefills and limits.pinned_blocks == 64
            _, page = await get(running.url + "/metrics")
            assert 'block_size="16"' in page and 'num_gpu_blocks="64"' in page
            assert 'prefix_caching_hash_algo="warmroute"' in page

    asyncio.run(scenario())


@pytest.mark.parametrize("example", ["configs/replica.yaml", "configs/docker/replica.yaml"])
def test_the_examples_are_valid(example: str) -> None:
    load_config(Path(__file__).parents[2] / example)
