"""``warmroute endpoint-picker``: the decisions of a router for an Envoy that carries the requests itself."""

import argparse
import importlib.util
import sys

from router.serve_command import run as run_router

NEEDS = ("grpc", "grpc_health", "google.protobuf")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says."""
    missing = [name for name in NEEDS if not _installed(name)]
    if missing:
        print(
            f"warmroute endpoint-picker: not installed: {', '.join(missing)}; "
            "run `pip install 'warmroute[envoy]'`",
            file=sys.stderr,
        )
        return 2
    from router.endpoint_picker.endpoint_picker import EndpointPicker

    return run_router(args, EndpointPicker)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package it would be in
        return False
