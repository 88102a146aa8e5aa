"""Asks a running router's admin port, for the commands that do."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping

KEY_VARIABLE = "WARMROUTE_ADMIN_KEY"
"""The environment variable with a key of the admin port, where it has keys."""


def ask_admin(
    url: str, body: bytes | None = None, *, headers: Mapping[str, str] | None = None, limit_s: float = 10.0
) -> bytes:
    """GET ``url``, or POST ``body`` there, with these ``headers``, too; the answer's body.

    Raises ``OSError`` that says what the port answered, or that nobody did.
    """
    sent = {"content-type": "application/json", **(headers or {})}
    key = os.environ.get(KEY_VARIABLE)
    if key:
        sent["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=body, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            raw: bytes = answer.read()
            return raw
    except urllib.error.HTTPError as error:
        hint = f"; set {KEY_VARIABLE} to a key of its admin port" if error.code in (401, 403) else ""
        answered = error.read(10_000)
        if error.code == 404 and b'"admin_error"' not in answered:
            hint = "; is it the router's public port? This needs its admin port (`admin`, 8081 by default)"
        raise OSError(f"{url} answered {error.code}: {_said(answered)}{hint}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url} cannot be reached: {error.reason}") from None


def _said(body: bytes) -> str:
    """What an error's body tells people: its message, where it has the form of the router's errors.

    >>> _said(b'{"error": {"message": "off", "code": 403}}'), _said(b"Forbidden")
    ('off', 'Forbidden')
    """
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
