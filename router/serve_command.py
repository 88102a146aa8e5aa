"""``warmroute serve``: a router from a file, or from flags alone."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from router.config import RouterConfig, load_config, parse_config
from router.config_errors import ConfigError, named_in_errors
from router.cost_config import COST_FIGURES

if TYPE_CHECKING:
    from router.proxy.request_path import MakeRequestPath

DEFAULT_PRICE = 1.0
"""Of ``PrefixAffinity``."""
DEFAULT_MEASURE = "outstanding_tokens"
"""Of ``LeastLoaded`` and ``PowerOfTwo``."""


def effective_config(args: argparse.Namespace) -> RouterConfig:
    """The config the arguments name; raises ``ConfigError``."""
    flags: dict[str, Any] = {
        key: value for key, value in (("listen", args.listen), ("admin", args.admin)) if value is not None
    }
    if args.policy is not None:
        flags["policy"] = {"kind": args.policy}
    if args.replica:
        flags["replicas"] = [{"url": url} for url in args.replica]
    if args.config is None:
        if not args.replica:
            raise ConfigError("no config: expected CONFIG.yaml, or --replica URL at least once")
        return parse_config(flags, "arguments")
    if not flags:
        return load_config(args.config)
    config = load_config(args.config)  # says what is wrong in the file before flags are laid over it
    data = config.model_dump(mode="python", exclude_unset=True)
    return parse_config(data | flags, f"{args.config} with flags")


def reloaded_config(args: argparse.Namespace) -> RouterConfig:
    """The same once the router runs. A pipe, which was read at the start, could be waited on for ever."""
    if not Path(args.config).exists():
        raise ConfigError(f"{args.config}: cannot be read again: there is no such file; the old config stays")
    if not Path(args.config).is_file():
        raise ConfigError(f"{args.config}: cannot be read again; expected a regular file")
    return effective_config(args)


def in_force(config: RouterConfig) -> str:
    """Every value as YAML that can be read again, secrets masked.

    The figures of ``cost`` are comments where hardware may say better: as keys they would rule that out.
    """
    shown = config.model_dump(mode="json")
    policy = shown["policy"]
    if policy["kind"] == "prefix_affinity" and policy["price"] is None:
        policy["price"] = DEFAULT_PRICE
    if policy["kind"] in ("least_loaded", "power_of_two") and policy["measure"] is None:
        policy["measure"] = DEFAULT_MEASURE
    text = yaml.safe_dump(shown, sort_keys=False)
    if config.cost.hardware is None:
        return text
    cost = config.cost
    figures = {name: getattr(cost, name) for name in COST_FIGURES}
    remarks = ["  # until the hardware, or what replicas show, says better:"]
    remarks += [f"  #   {name}: {value:g}" for name, value in figures.items()]
    return text.replace("\ncost:\n", "\n".join(("\ncost:", *remarks, "")), 1)


def run(args: argparse.Namespace, make_path: "MakeRequestPath | None" = None) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says. ``make_path``: how requests come in; HTTP unless set."""
    try:
        config = effective_config(args)
    except ConfigError as error:
        print(f"warmroute {args.command}: {error}", file=sys.stderr)
        return 2
    from router.proxy.assembly import Router
    from router.proxy.assembly import run as run_router
    from router.proxy.data_plane import DataPlane

    try:
        if args.check:
            with named_in_errors(args.config):
                Router(config, make_path=make_path or DataPlane)  # reads every file that the config names
            print(in_force(config), end="")
            return 0
        load = None if args.config is None else lambda: reloaded_config(args)
        return run_router(config, load, make_path or DataPlane, args.config)
    except ConfigError as error:  # a file it names, or a package it needs
        print(f"warmroute {args.command}: {error}", file=sys.stderr)
        return 2
