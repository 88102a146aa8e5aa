"""Reads a plan's YAML; what is wrong is said with file, key, what was given and what was expected."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from router.yaml_file import YamlError, read_yaml
from sim.plan.config import PlanConfig
from sim.plan.plan_error import PlanError

_ADAPTER: TypeAdapter[Any] = TypeAdapter(PlanConfig)
KINDS = ("online", "long_prompts", "offline", "memory", "tiers", "hybrid", "api_bill", "conversation")


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
    return parse_plan(data, str(path))


def parse_plan(data: Any, where: str) -> PlanConfig:
    """The plan in ``data``; raises ``PlanError`` naming every key that is wrong."""
    if not isinstance(data, dict):
        what = "empty" if data is None else f"a {type(data).__name__}"
        raise PlanError(f"{where}: {what}; expected a mapping with kind: {', '.join(KINDS)}")
    if data.get("kind") not in KINDS:
        what = f"kind is {data['kind']!r}" if "kind" in data else "kind is missing"
        raise PlanError(f"{where}: {what}; expected one of {', '.join(KINDS)}")
    try:
        return cast(PlanConfig, _ADAPTER.validate_python(data))
    except ValidationError as error:
        raise PlanError(_described(error, where)) from None


def _described(error: ValidationError, where: str) -> str:
    lines = []
    for one in error.errors():
        key = _key(one["loc"])
        given = one["input"]
        got = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
        message = one["msg"].removeprefix("Value error, ")
        match one["type"]:
            case "extra_forbidden":
                message, got = "unknown key; remove it or check its spelling", ""
            case "missing":
                message, got = "missing; it has no default", ""
            case "union_tag_not_found":
                message, got = f"{message}; give its kind", ""
        lines.append(f"{where}: {key}: {message}{got}")
    return "\n".join(dict.fromkeys(lines))


_KINDS = {
    ("replica", "roofline"),
    ("replica", "measured"),
    ("traffic", "numbers"),
    ("traffic", "trace"),
}


def _key(location: tuple[int | str, ...]) -> str:
    """The key as it is written: without the kinds that pydantic puts between.

    >>> _key(("online", "traffic", "trace", "trace")), _key(("online", "replica", "roofline", "gpu", "named"))
    ('traffic.trace', 'replica.gpu')
    >>> _key(("hybrid", "replica", "model"))
    'replica.model'
    """
    parts = [str(part) for part in location]
    written = [
        part
        for before, part in pairwise(parts)
        if (before, part) not in _KINDS and part not in ("named", "sized")
    ]
    return ".".join(written) or "(file)"
