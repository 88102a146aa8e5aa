"""The keys under ``state:``: what is refused and how, and that secrets are never shown."""

import pytest

from router.config import RouterConfig, parse_config
from router.config_errors import ConfigError

SENTINEL = {"service": "m", "hosts": ["h:1"]}


def parsed(**state: object) -> RouterConfig:
    return parse_config({"replicas": [{"url": "http://10.0.0.1"}], "state": state}, "test")


def test_memory_is_the_default_and_may_have_a_snapshot() -> None:
    assert parsed().state.kind == "memory"
    assert parsed(snapshot="/var/lib/warmroute/state").state.snapshot == "/var/lib/warmroute/state"


def test_who_shares_tenants_says_how_many_routers_there_are() -> None:
    """One that starts while Redis is down could not know it: N of them would let N times each limit pass."""
    tenants = {"salt_secret": "0123456789abcdef", "members": [{"name": "acme", "keys": ["sk-a"]}]}
    config = {"replicas": [{"url": "http://10.0.0.1"}], "state": {"kind": "redis", "url": "redis://h"}}
    with pytest.raises(ConfigError, match=r"tenants\.routers: missing"):
        parse_config(config | {"tenants": tenants}, "test")
    assert parse_config(config | {"tenants": tenants | {"routers": 3}}, "test").tenants is not None
    assert parse_config(config | {"tenants": tenants, "state": {}}, "test").tenants is not None


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"kind": "redis"}, "url: redis://"),
        ({"kind": "redis", "url": "http://10.0.0.1"}, "expected redis://"),
        ({"kind": "redis", "url": "redis://10.0.0.1:99999"}, "ort"),
        ({"kind": "redis", "url": "redis://10.0.0.1?ssl=1"}, "the keys of state"),
        ({"url": "redis://h"}, "url: not for kind memory"),
        ({"kind": "redis", "url": "redis://:a@h", "password": "b"}, "given twice"),
        ({"kind": "redis", "url": "redis://h", "tls": {"ca": "ca.pem"}}, "rediss://"),
        ({"kind": "redis", "url": "redis://h", "cluster": True, "sentinel": SENTINEL}, "cluster goes"),
        ({"kind": "redis", "url": "redis://h", "lease_s": 0.1}, "lease_s"),
        ({"kind": "redis", "url": "redis://h", "flush": 5}, "is it flush_ms?"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(state: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match="state") as caught:
        parsed(**state)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "state",
    [
        {"kind": "redis", "url": "redis://me:canary@10.0.0.1:6379/0"},
        {"kind": "redis", "url": "redis://10.0.0.1", "username": "me", "password": "canary"},
        {"kind": "redis", "url": "redis://h", "sentinel": {**SENTINEL, "password": "canary"}},
    ],
)  # fmt: skip
def test_B048_secrets_are_not_shown(state: dict[str, object]) -> None:
    assert "canary" not in str(parsed(**state).model_dump(mode="json"))
    for wrong in ({"url": "http://:canary@h"}, {"url": "redis://:canary@h?x"}, {"password": "two canaries"}):
        with pytest.raises(ConfigError) as caught:
            parsed(**{"kind": "redis", "url": "redis://h"} | wrong)
        assert "canar" not in str(caught.value)
