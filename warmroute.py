"""The command line: one subcommand per job, each imported only when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = str(Path(__file__).resolve().parent)
if ROOT not in sys.path:  # what `make compile` makes lies there, and an editable install maps only packages
    sys.path.append(ROOT)

Run = Callable[[argparse.Namespace], int]


_POLICIES = (
    "predicted_finish",
    "prefix_affinity",
    "least_loaded",
    "power_of_two",
    "session",
    "bounded_hash",
    "round_robin",
    "random",
)
"""The same as ``router.config.PolicyKind``, whose import takes longer than all of this."""


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    _router_arguments(parser, "public address (default 127.0.0.1:8080)")


def _router_arguments(parser: argparse.ArgumentParser, listen: str) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the router's config")
    parser.add_argument("--listen", metavar="HOST:PORT", help=listen)
    parser.add_argument("--admin", metavar="HOST:PORT", help="admin address (default 127.0.0.1:8081)")
    parser.add_argument("--replica", action="append", metavar="URL", help="a replica; may be repeated")
    parser.add_argument("--policy", metavar="KIND", help=f"{', '.join(_POLICIES)} (default the first)")
    parser.add_argument(
        "--check", action="store_true", help="print the effective config, secrets masked, and stop"
    )


def _serve(args: argparse.Namespace) -> int:
    from router.serve_command import run

    return run(args)


def _endpoint_picker_arguments(parser: argparse.ArgumentParser) -> None:
    _router_arguments(parser, "address of the gRPC port (default 127.0.0.1:8080)")


def _endpoint_picker(args: argparse.Namespace) -> int:
    from router.endpoint_picker.command import run

    return run(args)


def _replica_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the replica's config")
    parser.add_argument("--model", help="smollm2, tiny, tiny-hybrid, a .gguf file or a Hugging Face folder")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address (default 127.0.0.1:8000)")


def _replica(args: argparse.Namespace) -> int:
    from replica.server.huge_pages import begin_with_huge_pages

    begin_with_huge_pages()
    from replica.server.replica_command import run

    return run(args)


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.simulate_command import add_arguments

    add_arguments(parser)


def _simulate(args: argparse.Namespace) -> int:
    from sim.simulate_command import run

    return run(args)


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.replay_command import add_arguments

    add_arguments(parser)


def _replay(args: argparse.Namespace) -> int:
    from sim.replay_command import run

    return run(args)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.demo.demo_command import add_arguments

    add_arguments(parser)


def _demo(args: argparse.Namespace) -> int:
    from sim.demo.demo_command import run

    return run(args)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="ask a fresh fleet of this config")
    parser.add_argument(
        "request", metavar="REQUEST.json", help="an OpenAI request body; - for standard input"
    )
    parser.add_argument("--url", metavar="ADMIN_URL", help="ask a running router on its admin port")
    parser.add_argument("--tenant", metavar="NAME", help="as this tenant's request (default: a public key's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _explain(args: argparse.Namespace) -> int:
    from router.explain_command import run

    return run(args)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    from router.top_command import add_arguments

    add_arguments(parser)


def _top(args: argparse.Namespace) -> int:
    from router.top_command import run

    return run(args)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.plan.plan_command import add_arguments

    add_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    from sim.plan.plan_command import run

    return run(args)


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.diagnose.diagnose_command import add_arguments

    add_arguments(parser)


def _diagnose(args: argparse.Namespace) -> int:
    from sim.diagnose.diagnose_command import run

    return run(args)


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.calibrate.calibrate_command import add_arguments

    add_arguments(parser)


def _calibrate(args: argparse.Namespace) -> int:
    from sim.calibrate.calibrate_command import run

    return run(args)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.acceptance.compare_command import add_arguments

    add_arguments(parser)


def _compare(args: argparse.Namespace) -> int:
    from sim.acceptance.compare_command import run

    return run(args)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from sim.bench.bench_command import add_arguments

    add_arguments(parser)


def _bench(args: argparse.Namespace) -> int:
    from sim.bench.bench_command import run

    return run(args)


COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None], Run]] = {
    "serve": (
        "run a router",
        "warmroute serve --listen 127.0.0.1:8080 --replica http://127.0.0.1:8000",
        _serve_arguments,
        _serve,
    ),
    "endpoint-picker": (
        "pick replicas for an Envoy gateway that carries the requests itself",
        "warmroute endpoint-picker --listen 127.0.0.1:9002 --replica http://127.0.0.1:8000",
        _endpoint_picker_arguments,
        _endpoint_picker,
    ),
    "replica": (
        "run one replica",
        "warmroute replica --model smollm2 --listen 127.0.0.1:8000",
        _replica_arguments,
        _replica,
    ),
    "demo": (
        "three replicas of a real small model, a router, real conversations, two policies",
        "warmroute demo",
        _demo_arguments,
        _demo,
    ),
    "simulate": (
        "replay a trace through the routing code under a virtual clock",
        "warmroute simulate --policy round_robin,predicted_finish --replicas 8 --rate 2.5",
        _simulate_arguments,
        _simulate,
    ),
    "replay": (
        "send a trace to a running router",
        "warmroute replay --trace trace.jsonl --url http://127.0.0.1:8080",
        _replay_arguments,
        _replay,
    ),
    "calibrate": (
        "measure a replica's prefill and decode cost; print a config fragment",
        "warmroute calibrate --url http://127.0.0.1:8000",
        _calibrate_arguments,
        _calibrate,
    ),
    "explain": (
        "where would this request go, and why",
        "warmroute explain --url http://127.0.0.1:8081 request.json",
        _explain_arguments,
        _explain,
    ),
    "top": (
        "what a running router's fleet does, in a terminal",
        "warmroute top --url http://127.0.0.1:8081",
        _top_arguments,
        _top,
    ),
    "plan": (
        "how many replicas, dollars, bytes: arithmetic with its formulas, then a simulation",
        "warmroute plan configs/plans/online.yaml",
        _plan_arguments,
        _plan,
    ),
    "diagnose": (
        "why is the hit rate low: where every prompt token went, and what to do",
        "warmroute diagnose requests.jsonl --replicas 8",
        _diagnose_arguments,
        _diagnose,
    ),
    "compare": (
        "may traffic move to another replica: answers and times of two servers on the same prompts",
        "warmroute compare --baseline http://127.0.0.1:8000 --candidate http://127.0.0.1:8001 requests.jsonl",
        _compare_arguments,
        _compare,
    ),
    "bench": (
        "what this router costs beside the others found on the machine",
        "warmroute bench overhead --rivals rivals",
        _bench_arguments,
        _bench,
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, as every other message: with its 50 options the usage would hide it."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 done, 1 the job failed, 2 the arguments or the config are wrong."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(
        prog="warmroute", description="Prefix-aware load-balancing router fleet for LLM replicas."
    )
    asked = parser
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (text, example, add_arguments, _) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example: {example}"
        )
        if arguments[:1] == [name]:  # only the command that runs imports its code
            add_arguments(sub)
            asked = sub
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return COMMANDS[args.command][3](args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
