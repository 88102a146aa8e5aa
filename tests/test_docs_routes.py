"""Every path of an HTTP interface that the docs name is one that somebody serves."""

import re
from pathlib import Path

from tests.fakes.router_rig import RouterRig, with_router

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"(?:`|\b(?:GET|POST|DELETE) |:8081)(/[\w/.-]+)")
NOT_OF_THE_ADMIN_PORT = re.compile(
    r"/v1/"  # the public port, and replicas
    r"|/readiness$"  # the public port
    r"|/(reset_prefix_cache|server_info|props|info)$"  # replicas: ours, and other engines
    r"|/(proc|sys)\b"  # files
)


def _named() -> dict[str, list[str]]:
    """Documents by path."""
    found: dict[str, list[str]] = {}
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if document.name != "log.md":  # tells of the past
            for path in NAMED.findall(document.read_text(encoding="utf-8")):
                found.setdefault(path, []).append(document.name)
    return found


def test_every_route_that_docs_name_is_one_of_the_admin_port_or_known_elsewhere() -> None:
    named = {path: where for path, where in _named().items() if not NOT_OF_THE_ADMIN_PORT.match(path)}
    assert {"/fleet", "/decisions", "/drain/NAME", "/dashboard"} <= set(named)

    async def scenario(rig: RouterRig) -> None:
        unknown = {}
        for path, where in named.items():
            if (await rig.admin(path, "PATCH")).status != 405:  # a path it knows, a method it does not
                unknown[path] = where
        assert not unknown

    with_router(scenario)
