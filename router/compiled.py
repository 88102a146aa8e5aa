"""Does the request path run compiled (setup.py), and is what is compiled what the sources say?"""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import router.routing.fleet

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("replica", "router")


def is_compiled() -> bool:
    """The modules of the request path are C extensions."""
    return str(router.routing.fleet.__file__).endswith(tuple(EXTENSION_SUFFIXES))


def stale_modules(root: Path = ROOT) -> list[Path]:
    """In a checkout compiled in place: sources changed since, which would not be what runs."""
    if not (root / "setup.py").is_file():
        return []
    stale = []
    for package in PACKAGES:
        for source in sorted((root / package).rglob("*.py")) + sorted((root / package).rglob("*.c")):
            for suffix in EXTENSION_SUFFIXES:
                compiled = source.with_suffix(suffix)
                if compiled.is_file() and compiled.stat().st_mtime < source.stat().st_mtime:
                    stale.append(source.relative_to(root))
    return stale
