"""The guard against running a compiled form that is older than its source."""

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from router.compiled import stale_modules


def checkout(root: Path, *, source_s: float, compiled_s: float | None) -> Path:
    folder = root / "router" / "routing"
    folder.mkdir(parents=True)
    (root / "setup.py").touch()
    (folder / "fleet.py").touch()
    os.utime(folder / "fleet.py", (source_s, source_s))
    if compiled_s is not None:
        compiled = folder / f"fleet{EXTENSION_SUFFIXES[0]}"
        compiled.touch()
        os.utime(compiled, (compiled_s, compiled_s))
    return root


def test_a_source_that_changed_after_it_was_compiled_is_named(tmp_path: Path) -> None:
    assert stale_modules(checkout(tmp_path, source_s=200.0, compiled_s=100.0)) == [
        Path("router/routing/fleet.py")
    ]


def test_what_was_compiled_last_or_never_is_not(tmp_path: Path) -> None:
    assert not stale_modules(checkout(tmp_path / "fresh", source_s=100.0, compiled_s=200.0))
    assert not stale_modules(checkout(tmp_path / "pure", source_s=100.0, compiled_s=None))


def test_an_installed_package_is_not_judged_by_the_order_its_files_were_written_in(tmp_path: Path) -> None:
    root = checkout(tmp_path, source_s=200.0, compiled_s=100.0)
    (root / "setup.py").unlink()
    assert not stale_modules(root)
