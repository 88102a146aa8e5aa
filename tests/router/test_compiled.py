"""What is compiled: the guard against a form that is older than its source, and what must not be."""

import ast
import inspect
import os
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, get_args, get_type_hints

from router.compiled import stale_modules
from router.state.wire import Batch, Knowledge

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_source_in_c_that_changed_after_it_was_compiled_is_named(tmp_path: Path) -> None:
    root = checkout(tmp_path, source_s=100.0, compiled_s=200.0)
    kernel = root / "replica" / "kernel.c"
    kernel.parent.mkdir()
    for path, changed_s in ((kernel, 200.0), (kernel.with_suffix(EXTENSION_SUFFIXES[0]), 100.0)):
        path.touch()
        os.utime(path, (changed_s, changed_s))
    assert stale_modules(root) == [Path("replica/kernel.c")]


def test_what_was_compiled_last_or_never_is_not(tmp_path: Path) -> None:
    assert not stale_modules(checkout(tmp_path / "fresh", source_s=100.0, compiled_s=200.0))
    assert not stale_modules(checkout(tmp_path / "pure", source_s=100.0, compiled_s=None))


def test_an_installed_package_is_not_judged_by_the_order_its_files_were_written_in(tmp_path: Path) -> None:
    root = checkout(tmp_path, source_s=200.0, compiled_s=100.0)
    (root / "setup.py").unlink()
    assert not stale_modules(root)


def _classes(kind: Any, known: set[type]) -> Iterator[type]:
    """Those of ours whose fields a decoder of ``kind`` reads."""
    for one in get_args(kind):
        yield from _classes(one, known)
    if inspect.isclass(kind) and kind.__module__.startswith(("router.", "replica.")) and kind not in known:
        known.add(kind)
        yield kind
        for field in get_type_hints(kind, include_extras=True).values():
            yield from _classes(field, known)


def test_what_goes_over_the_wire_is_told_by_classes_that_keep_their_types() -> None:
    """Of ``tuple[float, float]`` a compiled class keeps ``type``: no router could read another's."""
    setup = ast.parse((ROOT / "setup.py").read_text())
    (plain,) = [
        ast.literal_eval(one.value)
        for one in setup.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "NOT_COMPILED"
    ]
    found = set(_classes(Batch | Knowledge, set()))
    assert {"Batch", "FleetLearned", "Learned", "PromptStored"} <= {one.__name__ for one in found}
    for one in found:
        file = Path(inspect.getfile(one))
        assert file.suffix == ".py" and (file.parent.name == "state" or file.name in plain), one
