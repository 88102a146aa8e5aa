"""The example plans, and reports of plans that a test writes itself."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sim.plan.make_report import make_report
from sim.plan.plan_file import load_plan, parse_plan
from sim.plan.worksheet import Report

FOLDER = Path(__file__).parents[2] / "configs" / "plans"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def example(name: str, *, simulated: bool = False) -> Report:
    """The report of ``configs/plans/<name>.yaml``."""
    return make_report(load_plan(FOLDER / f"{name}.yaml"), simulated=simulated)


def report(plan: dict[str, Any], *, simulated: bool = False) -> Report:
    """The report of a plan as a mapping."""
    return make_report(parse_plan(plan, "test"), simulated=simulated)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """An example as a mapping, with other values; ``replica__gpu`` is the key ``gpu`` of ``replica``."""
    data: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for key, value in changes.items():
        place = data
        *path, last = key.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    return data
