"""A sheet of your own: quantities and formulas, printed with their numbers like those of the other plans."""

from sim.plan.config import ArithmeticPlan
from sim.plan.formula import FormulaError
from sim.plan.plan_error import PlanError
from sim.plan.worksheet import Report, Worksheet


def plan_arithmetic(plan: ArithmeticPlan) -> Report:
    """The finished sheet. Raises ``PlanError`` for what is no arithmetic, or names what is not above."""
    sheet = Worksheet(plan.kind, plan.title or "arithmetic")
    for section in plan.sections:
        sheet.section(section.title)
        for line in section.lines:
            try:
                if line.formula is not None:
                    sheet.line(line.name, line.formula, line.unit, line.says)
                else:
                    assert line.value is not None, "a line has a value or a formula"
                    sheet.given(line.name, line.value, line.unit, line.says, "plan")
            except (FormulaError, ArithmeticError, TypeError, ValueError) as error:
                raise PlanError(f"section {section.title!r}, line {line.name}: {error}") from None
    for sentence in plan.answer:
        sheet.conclude(sentence)
    return sheet.done()
