"""Two tenants for tests, acme and bolt, and what their requests look like."""

import json
from typing import Any

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    chunk,
    delta,
)
from tests.fakes.proxy_rig import Rig
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_rig import RouterRig

SECRET = "a secret of more than 16".replace(" ", "-")
REST = chunk(delta(None, finish="stop")) + chunk(DONE_EVENT) + LAST_CHUNK
A, B = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}


def tenants(*members: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """``tenants:`` with acme (sk-a) and bolt (sk-b), unless others are given."""
    usual = ({"name": "acme", "keys": ["sk-a"]}, {"name": "bolt", "keys": ["sk-b"]})
    return {"salt_secret": SECRET, "members": [*(members or usual)], **keys}


def limited(**limits: Any) -> dict[str, Any]:
    return tenants({"name": "acme", "keys": ["sk-a"], "limits": limits}, {"name": "bolt", "keys": ["sk-b"]})


def code(answer: RawAnswer) -> tuple[int, str]:
    return answer.status, answer.error["code"]


def salts(rig: Rig | RouterRig) -> list[str | None]:
    return [json.loads(request.body).get("cache_salt") for request in rig.replica.requests]
