"""Every example: it loads, every line can be checked by hand, the same plan gives the same bytes."""

import json
from math import isfinite

import pytest

from sim.plan.formula import evaluate, names_in
from sim.plan.plan_file import KINDS, load_plan
from sim.plan.worksheet import Grid, Line, Report
from tests.sim.plan_examples import EXAMPLES, FOLDER, changed, example, report


def test_there_is_an_example_of_each_kind() -> None:
    assert {load_plan(FOLDER / f"{name}.yaml").kind for name in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_line_can_be_computed_again_from_the_lines_above_it(name: str) -> None:
    above: dict[str, float] = {}
    for line in example(name).lines():
        if line.formula is None:
            assert line.source, f"{line.name} comes from nowhere"
        else:
            assert set(names_in(line.formula)) <= set(above), f"{line.name} uses what comes later"
            assert evaluate(line.formula, above) == line.value
        assert line.name not in above
        above[line.name] = line.value


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_printed_numbers_give_the_printed_value(name: str) -> None:
    for line in example(name).lines():
        if line.numbers is None or not isfinite(line.value):
            continue
        # Six printed digits; where big numbers are subtracted a few of them are lost, and a rounded number
        # may fall on the other side of floor and ceil only by the whole unit that they round to.
        again = evaluate(line.numbers, {})
        assert again == pytest.approx(line.value, rel=2e-3, abs=2e-5), f"{line.name} = {line.numbers}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_answers_and_its_json_is_whole(name: str) -> None:
    made = example(name)
    assert made.answer
    data = json.loads(json.dumps(made.json_object(), allow_nan=False))
    entries = [entry for section in data["sections"] for entry in section["entries"]]
    named = [entry for entry in entries if "name" in entry]
    assert [entry["name"] for entry in named] == [line.name for line in made.lines()]
    assert all({"says", "value", "unit"} <= set(entry) for entry in named)
    assert all(("formula" in entry) == ("numbers" in entry) for entry in named)
    assert all(("formula" in entry) != ("source" in entry) for entry in named)


@pytest.mark.parametrize("name", EXAMPLES)
def test_tables_repeat_lines(name: str) -> None:
    made = example(name)
    for cell in _cells(made):
        assert made.value(cell.name) == cell.value


def _cells(made: Report) -> list[Line]:
    grids = [entry for section in made.sections for entry in section.entries if isinstance(entry, Grid)]
    for grid in grids:
        assert all(len(row) == len(grid.columns) for row in grid.rows)
    return [cell for grid in grids for row in grid.rows for cell in row if isinstance(cell, Line)]


def test_the_same_plan_gives_the_same_bytes() -> None:
    plan = changed("long_prompts", simulate={"requests": 60})
    once, twice = (json.dumps(report(plan, simulated=True).json_object()) for _ in range(2))
    assert once == twice
    assert "prefill_simulated_ttft_mean_ms" in once
