"""The snapshot file of one router alone: whole or not there, and no start fails because of it."""

import asyncio
import logging
import os
import resource
from pathlib import Path

import pytest

from router.proxy.state_report import state_metrics
from router.state import memory_state
from tests.state.members import Member, until


def member(file: Path, **keys: object) -> Member:
    return Member({"kind": "memory", "snapshot": str(file), **keys})


def written(file: Path) -> bytes:
    async def main() -> None:
        one = member(file)
        await one.state.start()
        for name in range(500):
            one.end(one.send(name))
        await one.state.stop()

    asyncio.run(main())
    return file.read_bytes()


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "state"
        one = member(file, snapshot_interval_s=0.02)
        await one.state.start()
        one.end(one.send(1))
        await until(file.exists)
        await one.state.stop()

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir()] == ["state"], "nothing else is left"


def test_a_place_that_cannot_be_written_to_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        one = member(tmp_path / "missing" / "state")
        await one.state.start()
        assert "cannot be written" in (one.report.fault or "")
        await one.state.stop()

    asyncio.run(main())
    assert len([r for r in caplog.records if r.name == "warmroute.state"]) == 1


def test_a_disk_that_fills_keeps_the_old_one_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ENOSPC, the file that is being written ends in the middle: nothing of it is left."""
    caplog.set_level(logging.INFO, "warmroute.state")
    file = tmp_path / "state"
    before = written(file)
    left: list[list[str]] = []
    """What is in the folder after each attempt."""
    replace = memory_state._replace

    def watched(file: Path, data: bytes) -> None:
        try:
            replace(file, data)
        finally:
            left.append(os.listdir(tmp_path))

    monkeypatch.setattr(memory_state, "_replace", watched)

    def shown(one: Member) -> float:
        (family,) = state_metrics(one.report)
        return float(family.samples[0].value)

    async def main() -> None:
        one = member(file, snapshot_interval_s=0.01)
        await one.state.start()
        for name in range(500, 1_500):
            one.end(one.send(name))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        try:
            await until(lambda: one.report.snapshot_written is False)
            fault = one.report.fault
            assert fault is not None and "File too large; a restart will be cold" in fault
            changes, tried = one.report.changes, len(left)
            await until(lambda: len(left) > tried + 3)
            assert one.report.changes == changes and shown(one) == 0.0
            assert all(names == ["state"] for names in left)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await until(lambda: one.report.snapshot_written is True)
        assert one.report.fault is None and shown(one) == 1.0
        await one.state.stop()
        two = member(file)
        await two.state.start()
        assert two.knows(499) and two.knows(1_499)
        await two.state.stop()

    asyncio.run(main())
    said = [line for line in caplog.messages if "written" in line]
    assert len(said) == 2 and said[1] == "the snapshot is written again"


@pytest.mark.parametrize("cut", [1, 5, 1_000, -1])
def test_a_file_cut_short_is_used_as_far_as_it_goes(
    cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    file.write_bytes(written(file)[:cut])

    async def main() -> None:
        one = member(file)
        await one.state.start()
        one.end(one.send(1))
        assert "damaged" in (one.report.fault or "")
        await one.state.stop()

    asyncio.run(main())
    assert "damaged" in caplog.text


def test_junk_in_its_place_is_said_once_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    file.write_bytes(b"\x00\x00\x00\x05hello")

    async def main() -> None:
        one = member(file)
        await one.state.start()
        one.end(one.send(7))
        await one.state.stop()
        two = member(file)
        await two.state.start()
        assert two.knows(7) and two.report.fault is None
        await two.state.stop()

    with caplog.at_level(logging.WARNING, "warmroute.state"):
        asyncio.run(main())
    assert len(caplog.records) == 1


def test_what_is_remembered_of_a_replica_that_is_gone_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "state"
    written(file)

    async def main() -> None:
        one = member(file)
        one.fleet.replica_removed(0, 0.0)
        one.fleet.forget_departed()
        await one.state.start()
        assert one.fleet.index.held(0) == 0
        one.fleet.index.check_invariants()

    asyncio.run(main())


def test_the_least_recently_used_is_forgotten_first_as_before(tmp_path: Path) -> None:
    file = tmp_path / "state"

    async def main() -> None:
        one = member(file)
        await one.state.start()
        for name in (1, 2, 3, 1):
            one.fleet.index.insert(0, [name * 100 + block for block in range(10)])
        await one.state.stop()
        two = member(file)
        await two.state.start()
        two.fleet.index.set_capacity(0, 20 * 16)
        assert [two.fleet.index.match([name * 100 + b for b in range(10)])[0] for name in (1, 2, 3)] == [
            10,
            0,
            10,
        ]
        await two.state.stop()

    asyncio.run(main())


def test_it_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.touch(0o644)
    written(file)
    assert file.stat().st_mode & 0o777 == 0o600
