"""docs/planning.md: every line it shows is printed by the command above it, every number is one of those.

``python -m tests.sim.test_plan_docs`` writes the lines anew after the arithmetic or its base changed.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from sim.plan.make_report import make_report
from sim.plan.plan_file import load_plan
from sim.plan.report_view import plain_lines

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "planning.md"
BLOCK = re.compile(r"^```console\n\$ warmroute plan (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?")


@cache
def output(plan: str) -> tuple[str, ...]:
    """What the command prints."""
    return tuple(plain_lines(make_report(load_plan(ROOT / plan))))


def blocks() -> list[tuple[str, list[str]]]:
    """(plan, lines shown of its output) of every block."""
    return [(match[1], match[2].splitlines()) for match in BLOCK.finditer(DOC.read_text())]


@pytest.mark.parametrize("plan", sorted({plan for plan, _ in blocks()}))
def test_every_line_shown_is_printed_by_its_command(plan: str) -> None:
    printed = set(output(plan))
    for shown_of, lines in blocks():
        if shown_of == plan:
            assert lines
            for line in lines:
                assert line in printed, "run `python -m tests.sim.test_plan_docs` and read what changed"


def test_every_number_in_the_text_is_printed_by_a_command() -> None:
    printed = {number for plan, _ in blocks() for line in output(plan) for number in NUMBER.findall(line)}
    prose = BLOCK.sub("", DOC.read_text())
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", prose, flags=re.DOTALL)
    numbers = [number.rstrip(",") for number in NUMBER.findall(prose)]
    worked = [number for number in numbers if "." in number or int(number.replace(",", "")) >= 10]
    assert worked
    assert not [number for number in worked if number not in printed]


def test_every_example_is_shown_or_named() -> None:
    text = DOC.read_text()
    missing = [path.name for path in (ROOT / "configs" / "plans").glob("*.yaml") if path.name not in text]
    assert not missing


def refreshed() -> str:
    """The document with each line replaced by the one of the same name, or begin, that is printed now."""

    def anew(match: re.Match[str]) -> str:
        lines = [_printed_now(match[1], line) for line in match[2].splitlines()]
        return f"```console\n$ warmroute plan {match[1]}\n" + "\n".join(lines) + "\n```"

    return BLOCK.sub(anew, DOC.read_text())


def _printed_now(plan: str, line: str) -> str:
    """Of the same name, or in a table the row that begins alike; as it is, if it is printed still."""
    if line in output(plan):
        return line
    end = " = " if " = " in line else "  "
    return next((one for one in output(plan) if one.split(end)[0] == line.split(end)[0]), line)


if __name__ == "__main__":
    DOC.write_text(refreshed())
