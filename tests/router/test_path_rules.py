"""Paths that the operator closes to clients, however they are spelt."""

import pytest

from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.path_rules import PathRules
from tests.fakes.proxy_rig import CHAT, Rig, with_rig
from tests.fakes.router_rig import RouterRig, with_router

REFUSED = ["/v1/load_lora_adapter", "DELETE /v1/files/*"]
SPELLINGS = [
    ("POST", "/v1/load_lora_adapter"),
    ("GET", "/v1/load_lora_adapter?x=1"),
    ("POST", "/v1/load_lora_adapter/"),
    ("POST", "/v1//load_lora_adapter"),
    ("POST", "/v1/load%5Flora_adapter"),
    ("POST", "/v1/load%255Flora_adapter"),
    ("POST", "/v1%2Fload_lora_adapter/x/.."),
    ("POST", "/v1/%6Coad_lora_adapter"),
    ("POST", "/v1/Load_LoRA_adapter"),
    ("POST", "/v1/load_lora_adapter;a=b"),
    ("POST", "/v1/load_lora_adapter#"),
    ("POST", "/v1/load_lora_adapter#/x?y"),
    ("POST", "/v1/load_lora_adapter%00"),
    ("POST", "/v1/load_lora_adapter%20"),
    ("POST", "/v1/%09/load_lora_adapter%0a"),
    ("POST", "/v1/%252e/load_lora_adapter"),
    ("POST", "/v1/x/%252e%252e/load_lora_adapter"),
    ("POST", "/v1/\\load_lora_adapter"),
    ("POST", "/v1/" + "x/" * 5_000),
    ("POST", "/v1/%" + "25" * 1_000 + "5Fx"),
    ("DELETE", "/v1/files/file-1"),
    ("DELETE", "/v1/files/a/b"),
]


@pytest.mark.parametrize(("method", "path"), SPELLINGS, ids=range(len(SPELLINGS)))
def test_a_refused_path_reaches_no_replica(method: str, path: str) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, path, method=method)
        if answer.status != 404:  # what is not under /v1/ is unknown anyway
            assert (answer.status, answer.error["code"]) == (403, "path_refused")
        assert not rig.replica.requests

    with_rig(scenario, refused_paths=REFUSED)


def test_all_else_passes_and_without_rules_everything_does() -> None:
    async def passes(rig: Rig) -> None:
        asked = [("GET", "/v1/files/a%2Fb?x=%20"), ("POST", "/v1/files"), ("POST", "/v1/load_lora_adapters")]
        for method, path in asked:
            assert (await rig.ask(CHAT, path, method=method)).status == 200
        assert [seen.target.decode() for seen in rig.replica.requests] == [path for _, path in asked]

    async def all_pass(rig: Rig) -> None:
        for method, path in SPELLINGS[:6]:
            assert (await rig.ask(CHAT, path, method=method)).status == 200

    with_rig(passes, refused_paths=REFUSED)
    with_rig(all_pass)


def test_only_what_is_allowed_passes_and_the_routers_own_paths_stay() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await rig.ask(CHAT)).status == 200
        assert (await rig.ask(CHAT, "/v1/completions")).status == 403
        assert (await rig.ask(b"", "/v1/files/a", method="GET")).status == 200
        assert (await rig.ask(CHAT, "/v1/files/a", method="POST")).status == 403
        assert (await rig.ask(b"", "/v1/files/secret", method="GET")).status == 403
        for own in ("/v1/models", "/health", "/readiness"):
            assert (await rig.get(own)).status == 200
        await rig.reload(rig.entry(0), allowed_paths=["/v1/completions"], refused_paths=[])
        assert [(await rig.ask(CHAT, path)).status for path in ("/v1/completions", "/v1/x")] == [200, 403]

    paths = ["POST /v1/chat/completions", "GET /v1/files/*"]
    with_router(scenario, allowed_paths=paths, refused_paths=["/v1/files/secret*"])


def test_a_request_without_a_key_is_not_told_what_is_closed() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(CHAT, "/v1/load_lora_adapter")).status == 401
        key = {"Authorization": "Bearer sk-1"}
        assert (await rig.ask(CHAT, "/v1/load_lora_adapter", **key)).status == 403
        assert (await rig.ask(CHAT, **key)).status == 200

    with_rig(scenario, refused_paths=REFUSED, keys={"public": "sk-1"})


def test_get_means_head_too() -> None:
    rules = PathRules((), ("GET /v1/files",))
    methods = (b"GET", b"HEAD", b"POST")
    assert [rules.refuse(method, b"/v1/files") for method in methods] == [True, True, False]


@pytest.mark.parametrize("pattern", ["v1/x", "/v1/a b", "delete /v1/x", "/v1/%66", "/v1/x?y", 7, ""])
def test_a_pattern_that_could_never_match_is_an_error(pattern: object) -> None:
    with pytest.raises(ConfigError, match=r"refused_paths\.0: expected a path"):
        parse_config({"replicas": [{"url": "http://127.0.0.1:1"}], "refused_paths": [pattern]}, "test")
