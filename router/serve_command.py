"""``warmroute serve``: a router from a file, or from flags alone."""

import argparse
import sys
from typing import Any

import yaml

from router.config import ConfigError, RouterConfig, load_config, parse_config


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


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says."""
    try:
        config = effective_config(args)
    except ConfigError as error:
        print(f"warmroute serve: {error}", file=sys.stderr)
        return 2
    from router.proxy.assembly import Router
    from router.proxy.assembly import run as run_router

    try:
        if args.check:
            Router(config)  # reads every file that the config names
            print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
            return 0
        return run_router(config, None if args.config is None else lambda: effective_config(args))
    except ConfigError as error:  # a file it names, or a package it needs
        print(f"warmroute serve: {error}", file=sys.stderr)
        return 2
