"""What the admin port answers where it has nothing to tell: errors that say where to look."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.proxy_rig import CHAT
from tests.fakes.router_rig import RouterRig, with_router
from warmroute import main


def test_explain_tells_of_an_unknown_model_what_a_client_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**CHAT, "model": "another"}
    request = tmp_path / "request.json"
    request.write_text(json.dumps(other))

    async def scenario(rig: RouterRig) -> None:
        explained = await rig.admin("/explain", "POST", json.dumps(other).encode())
        assert explained.status == (await rig.ask(other)).status == 404
        assert explained.json()["error"]["message"] == "no replica serves the model 'another'"
        url = f"http://{rig.router.admin.address}"
        assert await asyncio.to_thread(main, ["explain", "--url", url, str(request)]) == 1
        said = capsys.readouterr().err
        assert "answered 404: no replica serves the model 'another'" in said and "public port" not in said
        public = f"http://{rig.router.data_plane.address}"
        assert await asyncio.to_thread(main, ["explain", "--url", public, str(request)]) == 1
        assert "is it the router's public port?" in capsys.readouterr().err
        assert (await rig.admin("/drain/r0", "POST")).status == 200
        explained = await rig.admin("/explain", "POST", json.dumps(CHAT).encode())
        assert explained.status == (await rig.ask(CHAT)).status == 503

    with_router(scenario)


def test_what_the_admin_port_does_not_have_is_answered_by_what_it_has() -> None:
    async def scenario(rig: RouterRig) -> None:
        for method, path, status, says in (
            ("GET", "/metric", 404, "the admin port has no /metric; it has "),
            ("POST", "/v1/chat/completions", 404, "public port (listen, 8080 by default)"),
            ("GET", "/reload", 405, "/reload of the admin port allows POST"),
            ("POST", "/metrics", 405, "/metrics of the admin port allows GET, HEAD"),
        ):
            answer = await rig.admin(path, method)
            error = answer.json()["error"]
            assert answer.status == error["code"] == status and error["type"] == "admin_error"
            assert says in error["message"]
            if status == 405:
                assert answer.field("allow") == says.split("allows ")[1]
            else:
                named = error["message"].split("it has ")[1].split(". ")[0].split(", ")
                assert {"/metrics", "/fleet", "/dashboard", "POST /explain"} <= set(named)
                assert len(named) == len(set(named))
        unknown = (await rig.admin("/drain/nobody", "POST")).json()["error"]["message"]
        assert unknown == "no replica is named 'nobody'; there are: r0"

    with_router(scenario)


def test_who_has_no_key_is_not_told_what_there_is() -> None:
    async def scenario(rig: RouterRig) -> None:
        answer = await rig.admin("/metric")
        assert answer.status == 401 and b"/fleet" not in answer.body

    with_router(scenario, keys={"admin": ["sk-admin"]})
