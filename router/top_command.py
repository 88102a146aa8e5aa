"""``warmroute top``: what a running router's fleet does, again and again, in a terminal."""

import argparse
import sys
import time
from collections import deque
from typing import Any

import orjson
from rich.console import Console
from rich.live import Live

from router.admin_client import ask_admin
from router.fleet_figures import fleet_figures
from router.top_view import lines, picture

WINDOW_S = 60.0
"""Rates and TTFT are of what was seen for so long."""
DECISIONS = 8
PREFIXES = 3
"""So many of each are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--url", required=True, metavar="ADMIN_URL", help="the router's admin port")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default 1")
    parser.add_argument("--once", action="store_true", help="print once and stop")
    parser.add_argument("--json", action="store_true", help="one JSON object per look instead of a picture")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 or 2 as INTERFACE says. Ends with Ctrl-C."""
    if not args.url.startswith(("http://", "https://")):
        print(f"warmroute top: --url: expected http://HOST:PORT of the router's admin port, got {args.url!r}",
              file=sys.stderr)  # fmt: skip
        return 2
    if not 0.0 < args.interval < float("inf"):
        print(f"warmroute top: --interval: expected seconds above 0, got {args.interval}", file=sys.stderr)
        return 2
    try:
        _follow(args, Watch(args.url))
    except BrokenPipeError:  # whoever reads what is printed has seen enough; ``main`` knows what that means
        raise
    except (OSError, ValueError) as error:
        print(f"warmroute top: {error}", file=sys.stderr)
        return 1
    return 0


class Watch:
    """Looks at ``/fleet``, ``/decisions`` and ``/prefixes``; remembers what a minute's figures need."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._seen: deque[tuple[float, dict[str, Any]]] = deque()

    def look(self) -> dict[str, Any]:
        """The fleet's figures. Raises ``OSError`` if nobody answers, ``ValueError`` if it is no router."""
        fleet = orjson.loads(ask_admin(f"{self._url}/fleet"))
        if not isinstance(fleet, dict) or not {"traffic", "replicas", "tenants", "state"} <= fleet.keys():
            raise ValueError(f"{self._url} is not the admin port of a router of this version")
        now = time.monotonic()
        while len(self._seen) > 1 and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        if self._seen and self._seen[-1][1]["traffic"]["requests"] > fleet["traffic"]["requests"]:
            self._seen.clear()  # the router was restarted
        since, earlier = self._seen[0] if self._seen else (now, None)
        self._seen.append((now, fleet))
        decisions = orjson.loads(ask_admin(f"{self._url}/decisions?limit={DECISIONS}"))["decisions"]
        prefixes = orjson.loads(ask_admin(f"{self._url}/prefixes"))["prefixes"][:PREFIXES]
        return fleet_figures(fleet, earlier, now - since, decisions=decisions, prefixes=prefixes)


def _follow(args: argparse.Namespace, watch: Watch) -> None:
    console = Console()
    if args.once or args.json or not console.is_terminal:
        while True:
            figures = watch.look()
            print(orjson.dumps(figures).decode() if args.json else "\n".join(lines(figures)), flush=True)
            if args.once:
                return
            time.sleep(args.interval)
    with Live(picture(watch.look()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            live.update(picture(watch.look()), refresh=True)
