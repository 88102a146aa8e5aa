"""Formulas and worksheets: what is printed is what is computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.plan.formula import FormulaError, evaluate, filled, names_in, plain
from sim.plan.worksheet import Line, Worksheet

VALUES = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False).map(lambda value: round(value, 3))


@given(VALUES, VALUES, st.floats(min_value=0.001, max_value=1e6))
def test_the_filled_formula_has_the_same_value(one: float, two: float, three: float) -> None:
    formula = "(one - two) * 3 / three + max(one, -two, 7) - min(two ** 2, 5)"
    values = {"one": one, "two": two, "three": three}
    shown = filled(formula, values)
    assert not names_in(shown)
    size = (abs(one) + abs(two)) * 3 / three + max(abs(one), abs(two)) + two**2 + 5
    assert evaluate(shown, {}) == pytest.approx(evaluate(formula, values), abs=2e-5 * size)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("a + missing", "names 'missing', which has no value yet"),
        ("a +", "invalid syntax"),
        ("__import__('os').getcwd()", "is no arithmetic"),
        ("a.real", "is no arithmetic"),
        ("'text'", "is no arithmetic"),
        ("[a for a in (1,)]", "is no arithmetic"),
        ("print(a)", "is no arithmetic"),
        ("a if a else a", "is no arithmetic"),
    ],
)
def test_only_arithmetic_over_known_names_is_evaluated(formula: str, message: str) -> None:
    with pytest.raises(FormulaError, match=message.replace("(", r"\(").replace(")", r"\)")):
        evaluate(formula, {"a": 1.0})


def test_dividing_by_nothing_is_infinite() -> None:
    assert evaluate("a / b", {"a": 2.0, "b": 0.0}) == float("inf")
    assert evaluate("-a / b", {"a": 2.0, "b": 0.0}) == float("-inf")
    assert evaluate("a / b", {"a": 0.0, "b": 0.0}) == 0.0


@pytest.mark.parametrize(
    ("value", "text"), [(1e14, "100000000000000"), (1e15, "1e+15"), (1 / 3, "0.333333"), (-2.0, "-2")]
)
def test_numbers_for_a_calculator(value: float, text: str) -> None:
    assert plain(value) == text


def test_a_scope_prefers_its_own_quantities_and_names_them_in_full() -> None:
    sheet = Worksheet("kind", "title")
    sheet.section("one")
    sheet.given("price", 2, "dollars", "a price", "plan")
    sheet.given("count", 3, "", "how many", "plan")
    with sheet.scope("NVMe disk"):
        sheet.given("price", 5, "dollars", "its price", "plan")
        assert sheet.line("bill", "price * count", "dollars", "its bill") == 15
        assert sheet["price"] == 5
    assert sheet.line("bill", "price * count", "dollars", "the bill") == 6
    assert sheet["nvme_disk_bill"] == 15
    lines = {line.name: line for line in sheet.done().lines()}
    assert lines["nvme_disk_bill"].formula == "nvme_disk_price * count"
    assert lines["nvme_disk_bill"].numbers == "5 * 3"


def test_a_quantity_is_written_once() -> None:
    sheet = Worksheet("kind", "title")
    sheet.section("one")
    sheet.given("a", 1, "", "a", "plan")
    with pytest.raises(FormulaError, match="'a' has a value already"):
        sheet.line("a", "1 + 1", "", "again")


def test_a_table_holds_lines_and_says_so_in_json() -> None:
    sheet = Worksheet("kind", "title")
    sheet.section("one")
    sheet.given("a", 1.5, "ms", "a", "plan")
    sheet.grid("both", [("row", ""), ("a", "ms"), ("b", "ms")], [["first", "a", ""]])
    entry = sheet.done().sections[0].entries[-1]
    assert not isinstance(entry, Line)
    made = sheet.done().json_object()["sections"][0]["entries"][-1]
    assert made["rows"] == [["first", {"name": "a", "value": 1.5}, ""]]
