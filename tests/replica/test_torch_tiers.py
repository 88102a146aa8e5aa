"""The torch engine over host and disk: what was evicted comes back, and whatever breaks is computed again."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.config import ConfigError
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from replica.contract.prefill_cost import PrefillCost
from replica.engine import Engine
from replica.engine_limits import TierLimits
from replica.kv_cache.fetch_plan import Tier
from replica.model.fingerprint import fingerprint
from replica.model.load import load_model
from replica.model.paged_kv import PagedKv
from replica.tier_movers import engine_tiers
from replica.tier_movers.disk_store import DiskStore
from tests.replica.equality_fuzz import BLOCK, DEAR
from tests.replica.models import finish_all, greedy_request, make_engine, tiny, token_ids
from tests.replica.serving import get, post, replica

PROMPTS = [tuple((7 * i + 31 * number) % 256 for i in range(70)) for number in range(3)]
POOL_BLOCKS = 7
"""Room for one prompt, its output and a little more."""
LIMIT_S = 10.0

Opener = Callable[..., Engine]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Makes engines over tiers, and closes them."""
    engines: list[Engine] = []

    def open_one(model_seed: int = 0, **tiers: Any) -> Engine:
        model = load_model("tiny", seed=model_seed) if model_seed else tiny()
        engines.append(
            make_engine(
                model,
                kv_blocks=POOL_BLOCKS,
                max_model_len=POOL_BLOCKS * 16,
                batch_invariant=True,
                record_events=True,
                tiers=TierLimits(**({"prefill": DEAR} | tiers)),
            )
        )
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def disk(folder: Path, blocks: int = 50, **more: Any) -> dict[str, Any]:
    return {"disk_folder": folder, "disk_bytes": blocks * BLOCK} | more


def right(prompt: tuple[int, ...]) -> list[int]:
    alone = make_engine(prefix_caching=False, batch_invariant=True)
    return token_ids(finish_all(alone, [greedy_request("a", prompt, 8)])["a"])


def ask(engine: Engine, prompt: tuple[int, ...]) -> int:
    """Tokens that were cached; the answer must be right."""
    deltas = finish_all(engine, [greedy_request("a", prompt, 8)])["a"]
    assert token_ids(deltas) == right(prompt)
    assert engine.load().kv_usage == 0.0
    return deltas[-1].cached_tokens


def fill(engine: Engine) -> None:
    """Each prompt pushes the one before it out of the device."""
    for prompt in PROMPTS:
        assert ask(engine, prompt) == 0


def files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("kv-*/*") if file.is_file()]


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
def test_what_was_evicted_comes_back(opened: Opener, tmp_path: Path, tiers: str) -> None:
    host = {"host_bytes": (20 if tiers == "host" else 8) * BLOCK} if tiers != "disk" else {}
    engine = opened(**host, **({} if tiers == "host" else disk(tmp_path)))
    fill(engine)
    for _ in range(2):
        for prompt in PROMPTS:
            assert ask(engine, prompt) >= 64
    counters = engine.tier_counters
    assert counters is not None
    if tiers != "disk":
        assert counters.fetched[Tier.HOST] > 0
    if tiers != "host":
        assert counters.fetched[Tier.DISK] > 0 and len(files(tmp_path)) >= 4
    if tiers == "both":
        assert counters.spilled > 0
    assert counters.corrupt == counters.failed_fetches == counters.late_fetches == 0


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink], ids=["one bit", "short", "gone"])
def test_a_damaged_file_is_computed_again(
    opened: Opener, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    engine = opened(**disk(tmp_path))
    fill(engine)
    for file in files(tmp_path):
        damage(file)
    assert ask(engine, PROMPTS[0]) == 0
    counters = engine.tier_counters
    assert counters is not None and counters.corrupt == 1, "the first block; the others were not needed"
    ask(engine, PROMPTS[1])
    assert ask(engine, PROMPTS[0]) >= 16, "what was computed again was stored again"


class FullDisk(DiskStore):
    """Every write meets a device without room."""

    def write(self, block_hash: bytes, payload: memoryview) -> int:
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(payload)
        raise AssertionError("/dev/full took something")


class BrokenDisk(DiskStore):
    """Every read fails."""

    def read(self, block_hash: bytes, checksum: int | None) -> bytearray:
        raise OSError(5, "Input/output error")


def test_a_full_disk_is_computed_again_and_left_alone_for_a_while(opened: Opener, tmp_path: Path) -> None:
    engine = opened(**disk(tmp_path))
    assert engine._tiers is not None
    engine._tiers._mover._disk.__class__ = FullDisk  # type: ignore[union-attr]
    fill(engine)
    assert ask(engine, PROMPTS[0]) == 0 and files(tmp_path) == []
    assert engine.tier_counters is not None
    assert engine.tier_counters.saved == 0 and engine.tier_counters.not_saved > 0


def test_a_disk_that_cannot_be_read_is_computed_again(opened: Opener, tmp_path: Path) -> None:
    engine = opened(**disk(tmp_path))
    assert engine._tiers is not None
    fill(engine)
    engine._tiers._mover._disk.__class__ = BrokenDisk  # type: ignore[union-attr]
    assert ask(engine, PROMPTS[0]) == 0
    assert engine.tier_counters is not None and engine.tier_counters.failed_fetches == 1


def test_a_disk_that_hangs_is_given_up_and_what_it_brings_later_harms_nobody(
    opened: Opener, tmp_path: Path
) -> None:
    answers = threading.Event()

    class Hanging(DiskStore):
        def read(self, block_hash: bytes, checksum: int | None) -> bytearray:
            content = super().read(block_hash, checksum)
            assert answers.wait(LIMIT_S)
            return content

    engine = opened(**disk(tmp_path, prefill=PrefillCost(0.05, 1e-3)))
    assert engine._tiers is not None
    fill(engine)
    engine._tiers._mover._disk.__class__ = Hanging  # type: ignore[union-attr]
    assert ask(engine, PROMPTS[0]) == 0
    assert engine.tier_counters is not None and engine.tier_counters.late_fetches == 1
    answers.set()
    for prompt in (PROMPTS[1], PROMPTS[0]):
        ask(engine, prompt)


def test_a_disk_that_takes_nothing_holds_so_many_blocks_in_memory(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    class Hanging(DiskStore):
        def write(self, block_hash: bytes, payload: memoryview) -> int:
            assert goes_on.wait(LIMIT_S)
            return super().write(block_hash, payload)

    monkeypatch.setattr(engine_tiers, "SAVED_AT_ONCE_BYTES", 8 * BLOCK)
    engine = opened(**disk(tmp_path))
    assert engine._tiers is not None and engine.tier_counters is not None
    engine._tiers._mover._disk.__class__ = Hanging  # type: ignore[union-attr]
    prompts = [tuple((11 * i + 13 * number) % 256 for i in range(70)) for number in range(8)]
    for number, prompt in enumerate(prompts):
        engine.add(greedy_request(f"{number}", prompt, 1))
        while not any(delta.finish_reason for delta in engine.step()):
            pass
    assert engine._tiers._mover._writes == 8 and engine.tier_counters.not_saved > 8
    goes_on.set()
    ask(engine, PROMPTS[0])
    engine.check_invariants()
    assert engine.tier_counters.saved >= 8, "what was under way has come"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_block_for_which_there_is_no_memory_is_computed_again(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, error: Exception
) -> None:
    engine = opened(**({"host_bytes": 20 * BLOCK} if tier == "host" else disk(tmp_path)))

    def refuses(kv: PagedKv, slots: torch.Tensor) -> torch.Tensor:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PagedKv, "read", refuses)
        fill(engine)
        assert ask(engine, PROMPTS[0]) == 0
    engine.check_invariants()
    assert engine.tier_counters is not None
    assert engine.tier_counters.saved == 0 and engine.tier_counters.not_saved > 4


def test_an_abort_during_a_fetch_leaves_nothing_held(opened: Opener, tmp_path: Path) -> None:
    answers = threading.Event()

    class Hanging(DiskStore):
        def read(self, block_hash: bytes, checksum: int | None) -> bytearray:
            assert answers.wait(LIMIT_S)
            return super().read(block_hash, checksum)

    engine = opened(**disk(tmp_path))
    assert engine._tiers is not None
    fill(engine)
    engine._tiers._mover._disk.__class__ = Hanging  # type: ignore[union-attr]
    engine.add(greedy_request("a", PROMPTS[0], 8))
    with pytest.raises(ValueError, match="in use"):
        engine.add(greedy_request("a", PROMPTS[1], 8))
    assert engine.has_work and engine.load().waiting == 1 and not engine.reset_prefix_cache()
    engine.check_invariants()
    engine.abort("a")
    engine.check_invariants()
    assert engine.load().kv_usage == 0.0 and engine.load().waiting == 0
    answers.set()
    assert ask(engine, PROMPTS[0]) >= 64


def test_the_next_process_finds_what_is_on_disk_and_another_model_does_not(
    opened: Opener, tmp_path: Path
) -> None:
    first = opened(**disk(tmp_path))
    fill(first)
    with pytest.raises(OSError, match="in use by another replica"):
        opened(**disk(tmp_path))
    first.close()
    second = opened(**disk(tmp_path))
    assert ask(second, PROMPTS[0]) >= 64
    second.close()
    kept = len(files(tmp_path))
    other = opened(model_seed=1, **disk(tmp_path))
    deltas = finish_all(other, [greedy_request("a", PROMPTS[0], 8)])["a"]
    assert deltas[-1].cached_tokens == 0 and token_ids(deltas) != right(PROMPTS[0])
    assert kept >= 5 and files(tmp_path) == []


def test_a_tier_below_one_block_is_refused(opened: Opener, tmp_path: Path) -> None:
    for tier in ({"host_bytes": BLOCK - 1}, disk(tmp_path) | {"disk_bytes": 1}):
        with pytest.raises(ValueError, match=f"hold no block of {BLOCK}"):
            opened(**tier)


def test_a_days_budget_bounds_what_is_written(opened: Opener, tmp_path: Path) -> None:
    engine = opened(**disk(tmp_path, disk_bytes_per_day=24 * 3 * BLOCK))
    fill(engine)
    assert len(files(tmp_path)) == 3, "an hour's share at once"
    assert engine.tier_counters is not None and engine.tier_counters.over_budget > 0


def test_a_reset_forgets_every_tier(opened: Opener, tmp_path: Path) -> None:
    engine = opened(host_bytes=2 * BLOCK, **disk(tmp_path))
    fill(engine)
    assert files(tmp_path) and engine.reset_prefix_cache()
    assert ask(engine, PROMPTS[0]) == 0
    deadline = time.monotonic() + LIMIT_S
    while len(files(tmp_path)) > 2:  # deleted in the background
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_events_tell_what_lies_where(opened: Opener, tmp_path: Path) -> None:
    engine = opened(host_bytes=3 * BLOCK, **disk(tmp_path, blocks=5))
    held: dict[str | None, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}

    def follow(events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                held[event.medium] |= set(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                held[event.medium] -= set(event.block_hashes)

    for prompt in [*PROMPTS, *PROMPTS]:
        ask(engine, prompt)
        follow(engine.take_events())
    assert engine._tiers is not None
    shelves = engine._tiers._tiers.shelves
    assert held["GPU"] == set(engine._scheduler.cache.cached_hashes())
    assert held["CPU"] == set(shelves[Tier.HOST].hashes) and len(held["CPU"]) == 3
    assert held["STORAGE"] == set(shelves[Tier.DISK].hashes) and len(held["STORAGE"]) == 5


def test_measured_costs_decide(opened: Opener) -> None:
    """Fetching is not worth it where computing costs nothing; and what computing costs is measured."""
    cheap = opened(host_bytes=20 * BLOCK, prefill=PrefillCost(0.0, 1e-12))
    fill(cheap)
    assert ask(cheap, PROMPTS[0]) == 0
    counters = cheap.tier_counters
    assert counters is not None and counters.recomputed > 0 and counters.fetched[Tier.HOST] == 0
    measuring = opened(host_bytes=20 * BLOCK, prefill=None)
    assert measuring._tiers is not None
    assumed = measuring._tiers._tiers.prefill
    fill(measuring)
    assert measuring._tiers._tiers.prefill != assumed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_blocks_keep_their_bits_on_the_way(dtype: torch.dtype, page: int) -> None:
    kv = PagedKv(tiny().shape, 64 // page, page, dtype)
    source, target = torch.randperm(64)[:16], torch.randperm(64)[:16]
    values = torch.randn(2, 2, 16, 2, 16).to(dtype)
    kv.write(source, values)
    block = kv.from_bytes(bytearray(kv.to_bytes(kv.read(source))))
    assert torch.equal(block, values) and block.nbytes == 16 * kv.bytes_per_token
    kv.write(target, block)
    assert torch.equal(kv.read(target), values)


def test_a_fingerprint_names_weights_type_and_block() -> None:
    names = {
        fingerprint(tiny(), 16),
        fingerprint(load_model("tiny"), 16),
        fingerprint(tiny(), 32),
        fingerprint(tiny(), 16, batch_invariant=True),
        fingerprint(load_model("tiny", "bf16"), 16),
        fingerprint(load_model("tiny", seed=1), 16),
    }
    assert len(names) == 5


def test_a_replica_with_tiers_serves_and_shows_them(tmp_path: Path) -> None:
    tiers = {"host_mib": 1, "disk_path": str(tmp_path), "disk_mib": 4, "prefill_us_per_token": 1e6}

    async def run() -> None:
        async with replica(tiers=tiers, kv_tokens=POOL_BLOCKS * 16) as running:
            for prompt in [*PROMPTS, PROMPTS[0]]:
                body = {"prompt": list(prompt), "max_tokens": 4, "temperature": 0}
                _, answer = await post(running.url + "/v1/completions", body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
            _, page = await get(running.url + "/metrics")
            assert 'kv_tier_fetched_blocks_total{engine="0",medium="CPU",model_name="tiny"} 4.0' in page
            assert 'outcome="saved"' in page
            with pytest.raises(ConfigError, match=r"tiers: .*in use by another replica"):
                async with replica(tiers=tiers):
                    pass
        async with replica(tiers=tiers):
            pass

    asyncio.run(run())
