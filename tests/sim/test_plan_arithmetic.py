"""A sheet of one's own: printed with its numbers, and refused where it cannot be computed."""

from typing import Any

import pytest

from sim.plan.plan_error import PlanError
from sim.plan.report_view import plain_lines
from tests.sim.plan_examples import report

SHEET: dict[str, Any] = {
    "kind": "arithmetic",
    "title": "two prompts",
    "sections": [
        {
            "title": "One",
            "lines": [
                {"name": "prompt", "value": 3300, "unit": "tokens", "says": "of a prompt"},
                {"name": "both", "formula": "2 * prompt", "unit": "tokens", "says": "of two"},
            ],
        }
    ],
}


def sheet_with(**line: Any) -> dict[str, Any]:
    return {**SHEET, "sections": [*SHEET["sections"], {"title": "Two", "lines": [line]}]}


def test_a_sheet_of_ones_own() -> None:
    made = report(SHEET)
    assert made.value("both") == 6_600
    assert list(plain_lines(made)) == [
        "two prompts",
        "",
        "## One",
        "prompt = 3,300 tokens   # of a prompt [plan]",
        "both = 2 * prompt = 2 * 3300 = 6,600 tokens   # of two",
    ]
    numbers = report(sheet_with(name="third", formula="3 * 2", says="of numbers alone"))
    assert "third = 3 * 2 = 6   # of numbers alone" in list(plain_lines(numbers))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"formula": "prompt * other"}, "section 'Two', line it: formula names 'other', which has no value"),
        ({"formula": "prompt.real"}, "section 'Two', line it: 'prompt.real' is no arithmetic"),
        ({"formula": "prompt *"}, "section 'Two', line it: formula 'prompt \\*'"),
        ({"formula": "(0 - prompt) ** 0.5"}, "section 'Two', line it: "),
        ({"formula": "10.0 ** 999"}, "section 'Two', line it: "),
        ({"formula": "9 ** 9 ** 9 ** 9"}, "line it: '9 .* 9' of 9, 387420489: "),
        ({"formula": "ceil(1 / 0)"}, r"line it: 'ceil\(1 / 0\)' of inf: cannot convert float infinity"),
        ({"value": float("inf")}, r"sections.1.lines.0.value: expected a finite number; got inf$"),
        ({"formula": "sqrt(0 - 1)"}, "section 'Two', line it: "),
        ({"formula": "max(prompt)"}, "section 'Two', line it: "),
        ({"name": "both", "value": 1.0}, "section 'Two', line both: 'both' has a value already"),
        ({}, "sections.1.lines.0: line it: expected either value or formula"),
        ({"value": 1.0, "formula": "1"}, "line it: expected either value or formula"),
        ({"name": "3rd", "value": 1.0}, "sections.1.lines.0.name"),
    ],
)
def test_what_a_sheet_cannot_compute_is_said(line: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        report(sheet_with(**{"name": "it", "says": "it", **line}))
