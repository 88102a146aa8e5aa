"""Reads a plan's YAML; what is wrong is said with file, key, what was given and what was expected."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from replica.contract.key_hints import spelling_hint
from replica.contract.yaml_file import YamlError, line_of, read_yaml
from sim.plan.config import PlanConfig
from sim.plan.plan_error import PlanError

_ADAPTER: TypeAdapter[Any] = TypeAdapter(PlanConfig)
KINDS = (
    "online",
    "long_prompts",
    "offline",
    "memory",
    "tiers",
    "hybrid",
    "api_bill",
    "conversation",
    "arithmetic",
)


def load_plan(path: str | Path) -> PlanConfig:
    """Read ``path``; raises ``PlanError``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise PlanError(f"{path}: not valid YAML: {error}") from None
    return parse_plan(data, str(path), text)


def parse_plan(data: Any, where: str, text: str | None = None) -> PlanConfig:
    """The plan in ``data``; raises ``PlanError`` naming every key that is wrong, and its line in ``text``."""
    if not isinstance(data, dict):
        what = "empty" if data is None else f"a {type(data).__name__}"
        raise PlanError(f"{where}: {what}; expected a mapping with kind: {', '.join(KINDS)}")
    if data.get("kind") not in KINDS:
        what = f"kind is {data['kind']!r}" if "kind" in data else "kind is missing"
        raise PlanError(f"{where}: {what}; expected one of {', '.join(KINDS)}")
    try:
        return cast(PlanConfig, _ADAPTER.validate_python(data))
    except ValidationError as error:
        raise PlanError(_described(error, where, text)) from None


def _described(error: ValidationError, file: str, text: str | None) -> str:
    lines = []
    found = error.errors()
    inside = {one["loc"][:depth] for one in found for depth in range(len(one["loc"]))}
    for one in found:
        if one["loc"] in inside:
            continue  # a list is too short because what is in it is wrong
        path = _path(one["loc"])
        line = None if text is None else line_of(text, path)
        where = file if line is None else f"{file}: line {line}"
        key = ".".join(map(str, path)) or "the plan"
        lines.append(f"{where}: {key}: {_what(one)}")
    return "\n".join(dict.fromkeys(lines))


def _what(one: ErrorDetails) -> str:
    """What was given, and what was expected instead."""
    given, context = one["input"], one.get("ctx", {})
    got = f"; got {given!r}" if isinstance(given, str | int | float | bool) else ""
    match one["type"]:
        case "extra_forbidden":
            return f"unknown key, {spelling_hint(PlanConfig, one['loc'])}"
        case "missing":
            return "missing; it has no default"
        case "union_tag_not_found":
            kinds = [kind for key, kind in _KINDS if key == one["loc"][-1]]
            return f"kind is missing; expected one of {', '.join(kinds)}"
        case "union_tag_invalid":
            return (
                f"kind is {context['tag']!r}; expected one of {context['expected_tags'].replace(chr(39), '')}"
            )
        case "value_error":
            message = one["msg"].removeprefix("Value error, ")
            return message if repr(given) in message else message + got
        case "model_type" | "dict_type":
            return f"expected keys and values below it{got}"
    message = one["msg"].removeprefix("Input should be ").split(", unable to parse")[0]
    return f"expected {message}{got}"


_KINDS = (
    ("replica", "roofline"),
    ("replica", "measured"),
    ("traffic", "numbers"),
    ("traffic", "trace"),
)


def _path(location: tuple[int | str, ...]) -> list[str | int]:
    """Keys as they are written: without the kinds that pydantic puts between.

    >>> _path(("online", "traffic", "trace", "trace"))
    ['traffic', 'trace']
    >>> _path(("online", "replica", "roofline", "gpu", "named"))
    ['replica', 'gpu']
    >>> _path(("hybrid", "replica", "model"))
    ['replica', 'model']
    """
    return [
        part
        for before, part in pairwise(location)
        if (before, part) not in _KINDS and part not in ("named", "sized")
    ]
