"""``warmroute replica``: a replica from a file, or from flags alone."""

import argparse
import sys
from typing import Any

from replica.config import ConfigError, ReplicaConfig, load_config, parse_config
from replica.server.openmp import bound_spinning


def effective_config(args: argparse.Namespace) -> ReplicaConfig:
    """The config the arguments name; raises ``ConfigError``."""
    flags: dict[str, Any] = {
        key: value for key, value in (("model", args.model), ("listen", args.listen)) if value is not None
    }
    if args.config is None:
        if args.model is None:
            raise ConfigError("no config: expected CONFIG.yaml, or --model smollm2 (or another model)")
        return parse_config(flags, "arguments")
    config = load_config(args.config)
    if not flags:
        return config
    data = config.model_dump(mode="python", exclude_unset=True)
    return parse_config(data | flags, f"{args.config} with flags")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says."""
    try:
        config = effective_config(args)
    except ConfigError as error:
        print(f"warmroute replica: {error}", file=sys.stderr)
        return 2
    bound_spinning()
    try:
        from replica.server.app import run as run_replica
    except ModuleNotFoundError as missing:
        print(
            f"warmroute replica: {missing.name} is not installed; run `pip install 'warmroute[replica]'`",
            file=sys.stderr,
        )
        return 1
    return run_replica(config)
