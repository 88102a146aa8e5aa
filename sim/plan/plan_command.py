"""``warmroute plan``: arithmetic first, every line with its formula and numbers; then the answer tried."""

import argparse

from rich.console import Console

from sim.command_output import complain, print_json
from sim.plan.formula import FormulaError
from sim.plan.make_report import make_report
from sim.plan.plan_error import PlanError
from sim.plan.plan_file import KINDS, load_plan
from sim.plan.report_view import print_report
from sim.progress_view import ProgressView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "plan",
        metavar="PLAN.yaml",
        help=f"the plan, with kind: {', '.join(KINDS)}; configs/plans has an example of each",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: each quantity, unit and formula")
    parser.add_argument(
        "--no-simulation", action="store_true", help="arithmetic only; the answer is not tried"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 2 the plan is wrong."""
    try:
        plan = load_plan(args.plan)
        with ProgressView() as view:
            report = make_report(plan, simulated=not args.no_simulation, progress=view.update)
    except PlanError as error:
        where = "" if str(error).startswith(str(args.plan)) else f"{args.plan}: "
        return complain("plan", f"{where}{error}", 2)
    except FormulaError as error:
        return complain("plan", f"{args.plan}: {error}; a number of the plan is far too large or small", 2)
    if args.json:
        print_json(report.json_object())
        return 0
    print_report(report, Console(highlight=False))
    return 0
