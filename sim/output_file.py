"""Files that a command writes at its end: whether it can is asked before it starts."""

import os
from collections.abc import Sequence
from pathlib import Path


class UnwritableFile(ValueError):
    """The option and its file, and why nothing can be written there."""


def not_written(option: str, named: str, error: OSError) -> str:
    """What to say when it failed at the end nevertheless."""
    return f"{option} {named}: cannot be written: {error.strerror or error}"


def require_writable(option: str, named: str, suffixes: Sequence[str] = ()) -> None:
    """Raise ``UnwritableFile`` now rather than after a long run. Creates nothing.

    ``suffixes``: those that the files get instead of the one in ``named``.
    """
    if not Path(named).name:
        raise UnwritableFile(f"{option} {named}: this names no file")
    for path in [Path(named).with_suffix(suffix) for suffix in suffixes] or [Path(named)]:
        folder = path.absolute().parent
        if not folder.is_dir():
            raise UnwritableFile(f"{option} {named}: the folder {folder} does not exist; make it first")
        if path.is_dir():
            raise UnwritableFile(f"{option} {named}: {path} is a folder; expected a file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise UnwritableFile(f"{option} {named}: {path} cannot be written; give another place")
