"""``make size``: lines of code per package and file, and the installed size of what the router needs."""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("router", "replica", "sim", "tests")
LONG = 400


def code_lines(path: Path) -> int:
    """Lines that are neither empty nor a comment; docstrings count, since they are written and read."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def needed_by(name: str) -> set[str]:
    """``name`` and every distribution it needs without extras, as far as they are installed here."""
    seen: set[str] = set()
    to_do = [name]
    while to_do:
        one = re.sub(r"[-_.]+", "-", to_do.pop()).lower()
        if one in seen:
            continue
        try:
            found = distribution(one)
        except PackageNotFoundError:
            continue  # needed on another system or Python only
        seen.add(one)
        for requirement in found.requires or ():
            if "extra ==" not in requirement:
                to_do.append(re.split(r"[ ;<>=!~\[(]", requirement, maxsplit=1)[0])
    return seen


def installed_bytes(found: Distribution) -> int:
    """Bytes of all files of a distribution."""
    paths = (Path(str(found.locate_file(file))) for file in found.files or ())
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    """Print the report."""
    total = 0
    for package in PACKAGES:
        files = sorted((ROOT / package).rglob("*.py"))
        counts = {path: code_lines(path) for path in files}
        total += sum(counts.values())
        print(f"{sum(counts.values()):6d}  {package}/  ({len(files)} files)")
        for path, count in counts.items():
            if count:
                lines = len(path.read_text(encoding="utf-8").splitlines())
                mark = f"  <- over {LONG} lines" if lines > LONG else ""
                print(f"        {count:5d}  {path.relative_to(ROOT)}{mark}")
    print(f"{total:6d}  in all\n")
    sizes = {name: installed_bytes(distribution(name)) for name in needed_by("warmroute") - {"warmroute"}}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  in all, for a router without the extra [replica]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
