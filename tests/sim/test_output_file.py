"""Every command that writes a file at its end says before it starts that it cannot."""

import os
from pathlib import Path

import pytest

from sim.output_file import UnwritableFile, require_writable
from tests.sim.commands import exit_code


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--compare", "2", "--plot"],
        ["diagnose", "mooncake", "--html"],
        ["demo", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_does_not_exist_is_one_line_and_nothing_runs(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "no" / "file"
    assert exit_code([*command, str(path)]) == 2
    said = capsys.readouterr()
    expected = f"{command[-1]} {path}: the folder {path.parent} does not exist; make it first"
    assert (said.out, said.err) == ("", f"warmroute {command[0]}: {expected}\n")


def test_nothing_is_made_or_changed_by_asking(tmp_path: Path) -> None:
    old = tmp_path / "old.html"
    old.write_text("old")
    require_writable("--html", str(old))
    require_writable("--html", str(tmp_path / "new.html"))
    require_writable("--plot", str(tmp_path / "picture"), (".png", ".svg"))
    require_writable("--json", os.devnull)
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"] and old.read_text() == "old"


@pytest.mark.parametrize(("named", "message"), [("", "names no file"), (".", "names no file")])
def test_a_file_must_be_named(named: str, message: str) -> None:
    with pytest.raises(UnwritableFile, match=message):
        require_writable("--plot", named, (".png", ".svg"))


@pytest.mark.parametrize("exists", [False, True])
def test_a_place_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    path = tmp_path / "file"
    if exists:
        path.touch()
    asked: list[Path] = []

    def access(place: Path, mode: int) -> bool:  # root may write everywhere
        asked.append(place)
        return False

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(UnwritableFile, match="cannot be written; give another place"):
        require_writable("--html", str(path))
    assert asked == [path if exists else tmp_path]
