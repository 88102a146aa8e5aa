"""``GET /dashboard``: one page, everything inline, put together at the start from ``dashboard_page/``.

It asks ``/fleet``, ``/decisions``, ``/prefixes`` and ``/explain`` of the same port.
"""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

PATH = "/dashboard"
SCRIPTS = ("values", "elements", "replicas", "traffic", "decisions", "tenants", "live")
"""In this order: each uses what stands in those before it."""


def _page() -> str:
    folder = files("router.proxy").joinpath("dashboard_page")
    script = "".join(folder.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    page = folder.joinpath("page.html").read_text("utf-8")
    page = page.replace("{{style}}", folder.joinpath("page.css").read_text("utf-8"))
    return page.replace("{{script}}", f'"use strict";\n{script}')


def _content_security_policy(page: str) -> str:
    """Only the page's own style and script run, and they reach only the port they came from.

    >>> _content_security_policy("<style>a</style><script>b</script>").split("; ")[1:3]
    ["style-src 'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='", "script-src 'sha256-PiPoFgA5W...'"]
    """
    style, script = (
        b64encode(sha256(text.encode()).digest()).decode()
        for tag in ("style", "script")
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    )
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src 'sha256-{style}'",
            f"script-src 'sha256-{script}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def add_dashboard(app: web.Application) -> None:
    """Serve the page on ``app``. It holds no data, so it needs no key; what it asks for does."""
    page = _page()
    headers = {
        "content-security-policy": _content_security_policy(page),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }

    async def dashboard(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers=headers)

    app.router.add_get(PATH, dashboard)
