"""The disk's write budget over restarts: what one process wrote, the next may not write again."""

import doctest
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine_limits import TierLimits
from replica.kv_cache import kept_budget as module
from replica.kv_cache.kept_budget import KeptBudget
from replica.kv_cache.write_budget import DAY_S, WriteBudget
from replica.tier_movers.disk_store import DiskStore
from tests.replica.equality_fuzz import BLOCK, DEAR
from tests.replica.models import finish_all, greedy_request, make_engine

DAILY = 24_000
AT_ONCE = 1_000


def test_doctests():
    assert doctest.testmod(module).failed == 0


def opened(record, wall_s, now=0.0):
    budget = WriteBudget(DAILY, now)
    return budget, KeptBudget(budget, record, now, wall_s)


def spend(budget, kept, size, now, wall_s, record):
    """Take, and keep what is due before the write; the record on disk."""
    assert budget.take(size, now)
    return kept.due(now, wall_s) or record


def test_a_restart_goes_on_with_what_is_left():
    budget, kept = opened(None, 100.0)
    record = spend(budget, kept, 700, 0.0, 100.0, None)
    budget, kept = opened(record, 100.0)
    assert not budget.take(301, 0.0) and budget.take(230, 0.0)


def test_time_that_passed_between_two_processes_refills():
    budget, kept = opened(None, 100.0)
    record = spend(budget, kept, 1_000, 0.0, 100.0, None)
    for seconds in (0, 600, 3_600, 10 * DAY_S):
        budget, _ = opened(record, 100.0 + seconds)
        assert budget.left(0.0) == pytest.approx(min(AT_ONCE, 23_000 / DAY_S * seconds), abs=1)


def test_a_clock_that_went_back_refills_nothing_and_is_forgiven():
    budget, kept = opened(None, 1e9)
    record = spend(budget, kept, 600, 0.0, 1e9, None)
    budget, kept = opened(record, 5.0)  # years before
    left = budget.left(0.0)
    assert 300 < left < 400
    record = spend(budget, kept, 50, 600.0, 605.0, record)
    budget, _ = opened(record, 605.0 + 3_600)
    assert budget.left(0.0) > left, "its record is of the new time: an hour refills it"


def test_a_clock_that_jumped_ahead_refills_what_may_be_written_at_once():
    budget, kept = opened(None, 5.0)
    record = spend(budget, kept, 900, 0.0, 5.0, None)
    budget, _ = opened(record, 1e9)
    assert budget.left(0.0) == AT_ONCE


DAMAGES = {
    "empty": lambda record: b"",
    "cut": lambda record: record[:-3],
    "a digit": lambda record: record.replace(b" 337 ", b" 937 "),
    "other bytes": lambda record: bytes(range(256)),
    "another version": lambda record: record.replace(b"budget 1", b"budget 2"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_leaves_nothing_until_time_refills(damage):
    budget, kept = opened(None, 100.0)
    record = spend(budget, kept, 600, 0.0, 100.0, None)
    assert damage(record) != record
    budget, kept = opened(damage(record), 200.0)
    assert not budget.take(1, 0.0)
    assert budget.take(50, 600.0) and kept.due(600.0, 800.0) is not None


def test_another_limit_counts_from_the_next_start():
    budget, kept = opened(None, 100.0)
    record = spend(budget, kept, 100, 0.0, 100.0, None)
    lower = WriteBudget(DAILY // 10, 0.0)
    KeptBudget(lower, record, 0.0, 100.0)
    assert lower.left(0.0) == AT_ONCE / 10
    unlimited = WriteBudget(None, 0.0)
    kept = KeptBudget(unlimited, record, 0.0, 100.0)
    assert unlimited.take(10**12, 0.0) and kept.due(0.0, 100.0) is None


def test_few_records_for_many_blocks_and_one_again_if_it_was_not_kept():
    budget, kept = opened(None, 100.0)
    records = 0
    for _ in range(900):
        assert budget.take(1, 0.0)
        records += kept.due(0.0, 100.0) is not None
    assert 10 <= records <= 20
    assert kept.due(0.0, 100.0) is None
    kept.not_kept()
    assert kept.due(0.0, 100.0) is None, "nothing was granted since"
    assert budget.take(1, 0.0) and kept.due(0.0, 100.0) is not None


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), back=st.booleans())
def test_no_day_exceeds_the_budget_however_often_processes_die(seed, back):
    chance = random.Random(seed)
    now = wall_s = 1e6
    record = None
    budget, kept = opened(record, wall_s, now)
    writes = []
    for _ in range(chance.randrange(10, 80)):
        passed = chance.choice([0.0, 1.0, 60.0, 1_000.0, 20_000.0])
        now += passed
        wall_s += passed
        if back and chance.random() < 0.1:
            wall_s -= chance.randrange(100_000)
        if chance.random() < 0.2:  # dies with what it has, and is started again
            budget, kept = opened(record, wall_s, now)
        size = chance.choice([1, 50, 400])
        while chance.random() < 0.7 and budget.take(size, now):
            record = kept.due(now, wall_s) or record
            writes.append((now, size))
    for first, _ in writes:
        assert sum(size for at, size in writes if first <= at < first + DAY_S) <= DAILY + 1
        assert sum(size for at, size in writes if at == first) <= AT_ONCE


def test_the_store_keeps_the_record_beside_the_blocks_of_any_model(tmp_path):
    store = DiskStore(tmp_path, "one", 64)
    assert store.budget_record() is None
    store.keep_budget(b"first")
    store.keep_budget(b"second")
    store.close()
    other = DiskStore(tmp_path, "other model", 64)
    assert other.budget_record() == b"second" and other.found() == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["budget", "kv-other model", "lock"]
    other.close()
    (tmp_path / "budget").unlink()
    (tmp_path / "budget").mkdir()
    store = DiskStore(tmp_path, "other model", 64)
    assert store.budget_record() == b"", "what cannot be read is no reason for a full budget"
    with pytest.raises(OSError, match="budget"):
        store.keep_budget(b"third")
    store.close()


PROMPTS = [tuple((7 * i + 31 * number) % 256 for i in range(70)) for number in range(3)]


def wrote(folder, blocks_at_once):
    """Blocks that an engine writes to disk as prompts push each other out of its memory, until it closes."""
    limits = TierLimits(
        disk_folder=folder,
        disk_bytes=50 * BLOCK,
        disk_bytes_per_day=24 * blocks_at_once * BLOCK,
        prefill=DEAR,
    )
    engine = make_engine(kv_blocks=7, max_model_len=112, tiers=limits)
    try:
        for prompt in PROMPTS:
            finish_all(engine, [greedy_request("a", prompt, 8)])
        assert engine.tier_counters is not None
        return engine.tier_counters.saved, engine.tier_counters.over_budget
    finally:
        engine.close()


def test_a_restarted_engine_does_not_write_the_day_s_budget_again(tmp_path):
    saved, refused = wrote(tmp_path, 4)
    assert saved == 4 and refused > 0
    for file in tmp_path.glob("kv-*/*"):
        file.unlink()  # so that there is something to write again
    saved, refused = wrote(tmp_path, 4)
    assert saved == 0 and refused > 0
    (tmp_path / "budget").write_bytes(b"\0" * 40)
    assert wrote(tmp_path, 4)[0] == 0
    (tmp_path / "budget").unlink()
    assert wrote(tmp_path, 4)[0] == 4
