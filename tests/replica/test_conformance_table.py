"""docs/conformance.md names every case, and only tests that are there."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE_CASES = ("B011", "B012", "B015", "B058", "B067", "B085", "B094", "B110", "B111", "B130")
IDS = (
    *(f"Q{number}" for number in range(1, 9)),
    *(f"H{number}" for number in range(1, 11)),
    *(f"M{number}" for number in range(1, 21)),
    *(f"S{number}" for number in range(1, 7)),
    *(f"D{number}" for number in range(1, 4)),
    *(f"Y{number}" for number in range(1, 11)),
    "W1",
    *(f"R{number}" for number in range(1, 11)),
    *"abcdefghij",
    *(f"bug {number}" for number in range(1, 39)),
    *ENGINE_CASES,
)
WITHOUT_A_TEST = {"M17", *(f"bug {number}" for number in (2, 4, 5, 22, 26, 31, 33))}
"""Rows that give a reason alone."""


@cache
def table():
    """Id -> the tests its row names."""
    rows = {}
    for line in (ROOT / "docs/conformance.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "id":
            assert cells[0] not in rows, f"{cells[0]} twice"
            assert cells[2], f"{cells[0]}: neither a test nor a reason"
            rows[cells[0]] = re.findall(r"`(test_\w+)`", cells[2])
    return rows


def test_every_case_has_a_row():
    assert list(table()) == list(IDS)


def test_every_test_named_exists():
    there = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    missing = {name for names in table().values() for name in names} - there
    assert not missing


def test_only_few_cases_make_no_sense_here():
    assert {case for case, names in table().items() if not names} == WITHOUT_A_TEST


def test_a_case_s_tests_bear_its_id():
    for case, names in table().items():
        if case[0] in "QHMB" and case not in WITHOUT_A_TEST:
            assert any(re.search(rf"_{case}(_|$)", name, re.IGNORECASE) for name in names), case
        if len(case) == 1:
            assert any(name.startswith(f"test_invariant_{case}_") for name in names), case
