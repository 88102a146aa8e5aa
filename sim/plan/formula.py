"""Formulas as text: what is printed is what is computed.

A formula is arithmetic over names and numbers, in Python's notation. It is parsed, never executed as code;
``filled`` gives the same formula with the numbers in place of the names, ready for a pocket calculator.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping

from sim.plan.queueing import erlang_c

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "ln": math.log,
    "erlang_c": erlang_c,
}


class FormulaError(ValueError):
    """A formula that is not arithmetic, or that names something unknown: a fault of this program."""


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """The formula's value; ``values`` gives its names. A division by zero is infinite, or 0 for 0 / 0.

    >>> evaluate("(prompt - shared) * token_us / 1000", {"prompt": 3300, "shared": 2900, "token_us": 32})
    12.8
    >>> evaluate("ceil(work / 0.8)", {"work": 3.3}), evaluate("1 / (1 - h)", {"h": 1})
    (5, inf)
    """
    return _value(_parse(formula), values)


def filled(formula: str, values: Mapping[str, float]) -> str:
    """The formula with numbers for its names.

    >>> filled("(prompt - shared) * token_us / 1000", {"prompt": 3300, "shared": 2900, "token_us": 32.04})
    '(3300 - 2900) * 32.04 / 1000'
    """
    tree = _parse(formula)
    names = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in _FUNCTIONS),
        key=lambda node: node.col_offset,
        reverse=True,
    )
    for node in names:
        value = _known(node.id, values)
        number = plain(value)
        if value < 0:
            number = f"({number})"
        assert node.end_col_offset is not None
        formula = formula[: node.col_offset] + number + formula[node.end_col_offset :]
    return formula


def names_in(formula: str) -> tuple[str, ...]:
    """The quantities a formula is made of, each once, in order of appearance.

    >>> names_in("max(a, b) / a")
    ('a', 'b')
    """
    found = [node for node in ast.walk(_parse(formula)) if isinstance(node, ast.Name)]
    found.sort(key=lambda node: node.col_offset)
    return tuple(dict.fromkeys(node.id for node in found if node.id not in _FUNCTIONS))


def plain(value: float) -> str:
    """A number for a calculator: whole ones in full, others to six digits.

    >>> plain(12600.0), plain(0.1 + 0.2), plain(13960000000.5), plain(float("inf"))
    ('12600', '0.3', '1.396e+10', 'inf')
    """
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.6g}"


def _parse(formula: str) -> ast.expr:
    try:
        return ast.parse(formula, mode="eval").body
    except SyntaxError as error:
        raise FormulaError(f"formula {formula!r}: {error.msg}") from error


def _known(name: str, values: Mapping[str, float]) -> float:
    try:
        return values[name]
    except KeyError:
        raise FormulaError(f"formula names {name!r}, which has no value yet") from None


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return _known(name, values)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            one, other = _value(left, values), _value(right, values)
            if isinstance(sign, ast.Div) and other == 0:
                return math.copysign(math.inf, one) if one else 0.0
            if isinstance(sign, ast.Pow):
                one = float(one)  # whole numbers would grow without end: 9 ** 9 ** 9
            made = _computed(node, _OPERATORS[type(sign)], one, other)
            if isinstance(made, complex):
                raise FormulaError(f"{ast.unparse(node)!r} is a root of a number below 0")
            return made
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _computed(node, _FUNCTIONS[name], *(_value(arg, values) for arg in args))
    raise FormulaError(f"{ast.unparse(node)!r} is no arithmetic")


def _computed(node: ast.expr, how: Callable[..., float], *given: float) -> float:
    try:
        return how(*given)
    except (ArithmeticError, ValueError, TypeError) as error:  # too large, 0 ** -1, sqrt(-1), max()
        reason = error.args[-1] if error.args else error
        raise FormulaError(f"{ast.unparse(node)!r} of {', '.join(map(plain, given))}: {reason}") from error
