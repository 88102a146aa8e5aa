"""The request log where its disk is full or its folder gone: rows are lost and counted, and it comes back."""

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.config import RequestLogConfig
from router.proxy.counters import Counters
from router.proxy.request_head import RequestHead
from router.proxy.request_log import RequestLog
from router.routing.prompt_blocks import read_prompt

HEAD = RequestHead(b"POST", b"/v1/chat/completions", False, {}, [])
PROMPT = read_prompt(json.dumps({"model": "m", "prompt": "word " * 100}).encode())


class Written:
    """A log whose rows are written one by one, as its thread does it."""

    def __init__(self, file: Path, **keys: Any) -> None:
        self.file = file
        self.counters = Counters()
        self.log = RequestLog(RequestLogConfig(file=str(file), **keys), self.counters)
        self.log.close()

    def row(self, name: str) -> None:
        """One more answered request."""
        self.log.answered(HEAD, b"", PROMPT, name, 0, None, None)
        row = self.log._rows.get()
        assert row is not None
        self.log._append([row])

    def names(self, number: int = 0) -> list[str]:
        """Whose rows are in the file, or in one that was put aside; each line must be whole."""
        path = self.file.with_name(f"{self.file.name}.{number}") if number else self.file
        return [json.loads(line)["replica"] for line in path.read_bytes().splitlines()]

    @property
    def dropped(self) -> int:
        return self.counters.request_log_dropped


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: what is written beyond that fails, after a part of it was written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.requests")


def test_a_full_disk_loses_whole_rows_says_so_once_and_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = Written(tmp_path / "log")
    log.row("a")
    with files_of_at_most(log.file.stat().st_size + 30):
        for name in "bcd":
            log.row(name)
    assert log.names() == ["a"] and log.dropped == 3
    log.row("e")
    log.row("f")
    assert log.names() == ["a", "e", "f"] and log.dropped == 3
    failed, works = caplog.messages
    assert "rows are dropped: [Errno 27] File too large" in failed
    assert works == f"{log.file} is written again; 3 rows are missing"


def test_a_device_that_takes_nothing_costs_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    log = Written(Path("/dev/full"))
    for name in "abc":
        log.row(name)
    assert log.dropped == 3 and len(caplog.messages) == 1


def test_a_rotation_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FILE.1 cannot be replaced: nothing is lost but what comes meanwhile, and the file does not grow."""
    log = Written(tmp_path / "log", rotate_mib=1e-6, keep=2)
    for name in "ab":
        log.row(name)
    assert (log.names(), log.names(1)) == (["b"], ["a"])
    (in_the_way := tmp_path / "log.2" / "x").mkdir(parents=True)
    for name in "cd":
        log.row(name)
    assert (log.names(), log.names(1), log.dropped) == (["b"], ["a"], 2)
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    log.row("e")
    assert [log.names(), log.names(1), log.names(2)] == [["e"], ["b"], ["a"]] and log.dropped == 2
    assert len(caplog.messages) == 2


def test_a_folder_that_is_gone_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder := tmp_path / "logs").mkdir()
    log = Written(folder / "log")
    log.row("a")
    log.file.unlink()
    folder.rmdir()
    log.row("b")
    assert log.dropped == 1
    folder.mkdir()
    log.row("c")
    assert log.names() == ["c"] and log.dropped == 1 and len(caplog.messages) == 2


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "removed"])
def test_a_file_that_somebody_took_away_is_begun_anew(tmp_path: Path, moved: bool) -> None:
    """As logrotate does, or an operator whose disk is full."""
    log = Written(tmp_path / "log")
    log.row("a")
    if moved:
        log.file.rename(tmp_path / "log.20261201")
    else:
        log.file.unlink()
    log.row("b")
    assert log.names() == ["b"] and log.dropped == 0
