"""Whose cache salts a replica takes, and that they part what is cached."""

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from replica.config import ConfigError, ReplicaConfig, parse_config
from replica.contract.cache_salt import signed_salt
from tests.replica.serving import USER, post, replica

KEY = "0123456789abcdef"
WORDS = "what one tenant wrote " * 20


async def cached_tokens(url: str, salt: str | None) -> int:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1}
    status, answer = await post(
        url + "/v1/chat/completions", body if salt is None else {**body, "cache_salt": salt}
    )
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def refusal(url: str, salt: object, path: str = "/v1/chat/completions") -> str:
    body = {"messages": USER, "prompt": "x", "max_tokens": 1, "cache_salt": salt}
    status, answer = await post(url + path, body)
    assert (status, answer["error"]["param"]) == (400, "cache_salt"), answer
    return str(answer["error"]["message"])


def test_a_router_signs_what_a_client_cannot_make() -> None:
    async def run() -> None:
        async with replica(cache_salt={"accept": "signed", "key": KEY}) as running:
            one, other = (signed_salt(name, KEY.encode()) for name in ("one", "other"))
            assert await cached_tokens(running.url, one) == 0
            assert await cached_tokens(running.url, one) > 300
            assert await cached_tokens(running.url, other) == 0
            assert await cached_tokens(running.url, None) == 0  # whoever has none shares with no tenant
            forged = (
                "one",
                "one.",
                one[:-1] + ("0" if one[-1] != "0" else "1"),
                one.upper(),
                f"x{one}",
                "é.é",
            )
            for salt in (*forged, signed_salt("one", b"another key")):
                for path in ("/v1/chat/completions", "/v1/completions"):
                    assert "a router has signed" in await refusal(running.url, salt, path)

    asyncio.run(run())


def test_any_salt_counts_only_where_that_is_said() -> None:
    async def run() -> None:
        async with replica() as running:
            assert "takes none" in await refusal(running.url, "mine")
            assert "1 to 128 characters" in await refusal(running.url, "")
        async with replica(cache_salt={"accept": "any"}) as running:
            assert [await cached_tokens(running.url, salt) > 0 for salt in ("a", "a", "b", None)] == [
                False,
                True,
                False,
                False,
            ]

    asyncio.run(run())


@pytest.mark.parametrize(
    "keys",
    [{"accept": "signed"}, {"accept": "any", "key": KEY}, {"key": KEY}, {"accept": "signed", "key": "short"}],
)
def test_key_and_rule_fit_and_the_key_is_never_shown(keys: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="key"):
        ReplicaConfig.model_validate({"model": "tiny", "cache_salt": keys})
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "tiny", "cache_salt": keys}, "replica.yaml")
    assert "replica.yaml: cache_salt" in str(caught.value)
    assert KEY not in str(caught.value) and "short" not in str(caught.value)
