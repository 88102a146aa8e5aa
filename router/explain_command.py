"""``warmroute explain``: where a request would go and why, from a running router or a config alone."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from router.admin_client import ask_admin
from router.config import load_config
from router.config_errors import ConfigError
from router.proxy.explanation import explanation, lines, no_prompt
from router.routing.decision import NoReplica
from router.routing.prompt_blocks import read_prompt


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says."""
    try:
        body = sys.stdin.buffer.read() if args.request == "-" else Path(args.request).read_bytes()
    except OSError as error:
        print(f"warmroute explain: {args.request}: cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    if (args.url is None) == (args.config is None):
        print("warmroute explain: give either CONFIG.yaml or --url ADMIN_URL", file=sys.stderr)
        return 2
    if args.tenant is not None and args.url is None:
        print(
            "warmroute explain: --tenant goes with --url: a fresh fleet holds nobody's prompts",
            file=sys.stderr,
        )
        return 2
    try:
        if args.url:
            result = _from_router(args.url, body, args.tenant)
        else:
            result = _from_config(args.config, body, args.request)
    except ConfigError as error:
        print(f"warmroute explain: {error}", file=sys.stderr)
        return 2
    except (OSError, NoReplica, ValueError) as error:
        print(f"warmroute explain: {error}", file=sys.stderr)
        return 1
    print(orjson.dumps(result).decode() if args.json else "\n".join(lines(result)))
    return 0


def _from_router(url: str, body: bytes, tenant: str | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected http://HOST:PORT of the router's admin port, got {url!r}")
    headers = None if tenant is None else {"x-warmroute-tenant": tenant}
    result = orjson.loads(ask_admin(url.rstrip("/") + "/explain", body, headers=headers))
    if not isinstance(result, dict) or "candidates" not in result:
        raise ValueError(f"{url} is not a router's admin port")
    return result


def _from_config(path: str, body: bytes, request: str) -> dict[str, Any]:
    """``request``: the name of the file that ``body`` is from."""
    from router.proxy.counters import Counters
    from router.proxy.fleet_config import make_fleet
    from router.proxy.prefill_request import splittable
    from router.proxy.prompt_reader import make_prompt_reader

    config = load_config(path)
    fleet = make_fleet(config)
    reader = make_prompt_reader(config, lambda: fleet.caches.exact.namings, Counters())
    prompt = read_prompt(body) if reader is None else reader.read_now(body)
    if not prompt.units:
        raise ConfigError(f"{request}: {no_prompt(body)}")
    decision, rows, asked = fleet.explain(prompt, time.monotonic(), two_steps=splittable(body))
    return explanation(fleet, decision, rows, asked)
