"""The config: defaults for who wrote only the replicas, and errors that say what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.config import RouterConfig, TlsConfig, load_config, parse_config
from router.config_errors import ConfigError
from router.config_values import Section
from router.discovery_config import AdminReplicasConfig, DnsDiscovery, FileDiscovery, KubernetesDiscovery
from router.proxy.fleet_config import make_fleet
from router.replica_config import KvEventsConfig, ReplicaConfig
from router.routing.block_source import BlockSettings
from router.routing.policies import POLICIES
from router.tenants_config import TenantConfig, TenantsConfig
from router.tracing_config import TracingConfig

TWO = [{"url": "http://10.0.0.1:8000"}, {"url": "http://10.0.0.2:8000/"}]


def test_replicas_alone_are_enough() -> None:
    config = parse_config({"replicas": TWO}, "x")
    assert config.policy.kind == "predicted_finish" and config.state.kind == "memory"
    assert config.admin.startswith("127.0.0.1:"), "the admin port is not public unless asked"
    assert [replica.effective_name for replica in config.replicas] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert config.replicas[1].url == "http://10.0.0.2:8000"


@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy_can_be_configured(kind: str) -> None:
    config = parse_config({"replicas": TWO, "policy": {"kind": kind}}, "x")
    assert type(make_fleet(config).policy) is POLICIES[kind]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "replicas"),
        ({"replicas": []}, "replicas"),
        ({"replicas": TWO, "polcy": {}}, "polcy"),
        ({"replicas": [{"url": "10.0.0.1:8000"}]}, "http://HOST:PORT"),
        ({"replicas": [{"url": "http://h:8000/v1"}]}, "without a path"),
        ({"replicas": [{"url": "http://u:p@h:8000"}]}, "credentials"),
        ({"replicas": [{"url": "http://h:99999"}]}, "replicas.0.url"),
        ({"replicas": [{"url": "http://h:0"}]}, "port 0 is no place"),
        ({"replicas": [{"url": "http://h", "name": "a\nb"}]}, "expected printable characters, got 'a\\n"),
        ({"replicas": [{"url": "http://h", "name": "a" * 9_000}]}, "up to 253 characters, got 9,000 (got 'a"),
        ({"replicas": [{"url": "ftp://h"}]}, "http://HOST:PORT"),
        ({"replicas": [{"url": "http://a b:80"}]}, "http://HOST:PORT"),
        ({"replicas": [*TWO, TWO[0]]}, "10.0.0.1:8000"),
        ({"replicas": TWO, "policy": {"kind": "fastest"}}, "policy.kind"),
        (
            {"replicas": TWO, "policy": {"kind": "round_robin", "price": 2}},
            "price belongs to prefix_affinity",
        ),
        ({"replicas": TWO, "policy": {"kind": "prefix_affinity", "measure": "wait"}}, "measure belongs"),
        ({"replicas": TWO, "slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"replicas": TWO, "listen": "8080"}, "HOST:PORT"),
        ({"replicas": TWO, "listen": 8080}, "HOST:PORT"),
        ({"replicas": TWO, "admin": None}, "HOST:PORT"),
        ({"replicas": TWO, "listen": "127.0.0.1:8081"}, "different"),
        ({"replicas": TWO, "timeouts": {"connect": 3}}, "timeouts.connect"),
        ({"replicas": TWO, "health": {"path": "health"}}, "health.path: expected a path that begins with /"),
        ({"replicas": TWO, "health": {"path": ""}}, "health.path"),
        ({"discovery": [{"kind": "file", "path": ""}]}, "discovery.0.file.path: String should have"),
        ({"replicas": TWO, "health": {"path": "/he alth"}}, "health.path"),
        ({"replicas": TWO, "health": {"path": "/health#a"}}, "health.path"),
        ({"replicas": TWO, "health": {"path": 1}}, "health.path"),
        ({"replicas": TWO, "readiness": "process"}, "'replica' or 'router'"),
        ({"replicas": TWO, "admin_hosts": ["ops.example.org:443"]}, "admin_hosts.0: expected a host name"),
        ({"replicas": TWO, "admin_hosts": ["*.example.org"]}, "without *"),
        (
            {"replicas": [{"url": "http://a:1", "role": "prefill"}]},
            "a:1 has role prefill, but nobody could pull",
        ),
        ({"replicas": [{"url": "http://a:1", "role": "decode"}]}, "a:1 has role decode, but cannot pull KV"),
        ({"replicas": [{"url": "http://a:1", "kv_source": "a"}]}, "kv_source: expected HOST:PORT, got 'a'"),
        ({"replicas": [{"url": "http://a:1", "kv_source": "a\r\nb:1"}]}, "expected HOST:PORT"),
        ({"replicas": [{"url": "http://a:1", "kv_pull": "nixl"}]}, "replicas.0.kv_pull"),
        ({"replicas": [{"url": "http://a:1", "transfer": {"us_per_token": 0}}]}, "us_per_token"),
        ([], "mapping"),
    ],
)
def test_what_is_wrong_is_named(data: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "router.yaml")
    assert says in str(caught.value) and "router.yaml" in str(caught.value)
    assert len(str(caught.value)) < 1_000


def test_a_wrong_entry_is_said_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"replicas": [{"url": "a:1"}]}, "router.yaml")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "empty"), ("replicas: [", "not valid YAML"), (": : :", "not valid YAML"), ("3", "mapping")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("admin: h:1\nreplicas: []\nadmin: h:2\n", "line 3: the key 'admin' is given twice, first in line 1"),
        ("replicas:\n  - url: http://a:1\n    weight: 1\n    url: http://b:1\n", "line 4: the key 'url'"),
        ("limits: {body_bytes: 1, body_bytes: 2}\n", "line 1: the key 'body_bytes' is given twice"),
        ('slo: {}\n"slo": {}\n', "line 2: the key 'slo'"),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_one_server_under_several_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    urls = ("http://gpu:80", "http://other:8000", "http://GPU/", "https://gpu", "http://gpu")
    lines = (f"  - {{name: r{number}, url: {url!r}}}\n" for number, url in enumerate(urls))
    path.write_text("replicas:\n" + "".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and "given 3 times" in said
    assert "replicas.0.url, replicas.2.url, replicas.4.url: one server" in said


def test_merge_keys_are_not_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        "replicas:\n  - &one {url: 'http://a:1', weight: 2, model: m}\n"
        "  - &two {<<: *one, url: 'http://b:1'}\n  - {<<: *two, url: 'http://c:1', weight: 3}\n"
    )
    config = load_config(path)
    assert [(r.url[-3], r.weight, r.model) for r in config.replicas] == [
        ("a", 2, "m"),
        ("b", 2, "m"),
        ("c", 3, "m"),
    ]


def test_off_where_a_word_belongs_is_told_the_words() -> None:
    for data, says in (
        (
            {"replicas": TWO, "log": {"level": False}},
            "log.level: expected debug or info or warning or error; YAML",
        ),
        (
            {"replicas": TWO, "slo": {"ttft_ms": True}},
            "slo.ttft_ms: expected another value, or quotes around it",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(data, "router.yaml")
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"replicas": TWO, "polcy": {}}, "polcy: unknown key, is it policy?"),
        ({"replicas": TWO, "timeouts": {"frist_byte_s": 3}}, "is it first_byte_s?"),
        (
            {"replicas": [TWO[0] | {"wieght": 2}]},
            "replicas.0.wieght: unknown key, is it weight?",
        ),
        ({"replica": TWO}, "replica: unknown key, is it replicas?"),
        ({"replicaz": TWO}, "replicaz: unknown key, is it replicas?"),
        ({"replicas": TWO, "tttf_ms": 1}, "unknown key, remove it or check its spelling"),  # it is slo's
        ({"replicas": TWO, "zzzzzz": 1}, "unknown key, remove it or check its spelling"),
        ({"replicas": TWO, "log": {"zzz": 1}}, "its spelling; expected some of format, level, requests"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(data: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "router.yaml")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"replicas": TWO, "policy": "random"},
            "policy: expected keys and values below it, as in `policy: {kind: random}` (got 'random')",
        ),
        (
            {"replicas": ["http://me:pw@a:1"]},
            "replicas.0: expected keys and values below it, as in `- url: http://**********@a:1` (got ",
        ),
        ({"replicas": TWO, "log": {"requests": "F"}}, "as in `requests: {file: F}` (got 'F')"),
        ({"replicas": TWO, "slo": 5}, "slo: expected keys and values below it: ttft_ms, tpot_ms (got 5)"),
        ({"replicas": TWO, "keys": "sk-1"}, "keys: expected keys and values below it: public, admin"),
        ({"replicas": TWO, "listen": "foo"}, "listen: expected HOST:PORT or unix:/path, got 'foo'"),
        ({"replicas": [TWO[0], TWO[0]]}, "router.yaml: replica names must differ"),
        ({"replicas": None}, "replicas: expected a list with `- ` before each entry"),
        ({"replicas": {"url": "http://a:1"}}, "replicas: expected a list with `- ` before each entry"),
        ({"replicas": TWO, "admin_hosts": "a"}, "expected a list, as in `admin_hosts: [a]` (got 'a')"),
    ],
)
def test_a_plain_value_where_keys_belong_is_answered_in_our_words(data: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "router.yaml")
    said = str(caught.value)
    assert says in said and said.count("got '") <= 1
    assert "dictionary" not in said and "tuple" not in said and "sk-1" not in said and "pw@" not in said


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_the_key_is_never_shown() -> None:
    config = parse_config({"replicas": TWO, "api_key": "sk-secret"}, "x")
    assert "sk-secret" not in repr(config) and "sk-secret" not in config.model_dump_json()


def kv_events(value: object) -> KvEventsConfig:
    config = parse_config({"replicas": [{"url": "http://h:1", "kv_events": value}]}, "x")
    assert config.replicas[0].kv_events is not None
    return config.replicas[0].kv_events


@pytest.mark.parametrize(
    ("value", "binds"),
    [
        ("tcp://10.0.0.1:5557", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ({"endpoint": "tcp://10.0.0.9:5557", "bind": True}, True),
        ({"endpoint": "tcp://*:5557", "replay": "tcp://10.0.0.1:5558", "topic": "kv"}, True),
        ({"endpoint": "ipc:///tmp/kv"}, False),
    ],
)
def test_kv_events_connect_unless_the_host_is_a_wildcard(value: object, binds: bool) -> None:
    assert kv_events(value).binds is binds


@pytest.mark.parametrize(
    ("replicas", "says"),
    [
        ([{"kv_events": "10.0.0.1:5557"}], "tcp://HOST:PORT"),
        ([{"kv_events": "tcp://10.0.0.1"}], "tcp://HOST:PORT"),
        ([{"kv_events": {"endpoint": "tcp://h:1", "replay": "http://h:2"}}], "kv_events.replay"),
        ([{"kv_events": {"endpoint": "tcp://*:1", "bind": False}}], "name the replica's host"),
        ([{"kv_events": {"address": "tcp://h:1"}}], "kv_events.address"),
        ([{"kv_events": "tcp://*:5557"}, {"kv_events": "tcp://*:5557"}], "ports of their own"),
        ([{"block_hash": "md5"}], "block_hash"),
        ([{"block_size": 0}], "block_size"),
    ],
)
def test_wrong_blocks_and_events_are_named(replicas: list[dict[str, object]], says: str) -> None:
    named = [{"url": f"http://h{index}:1"} | one for index, one in enumerate(replicas)]
    with pytest.raises(ConfigError) as caught:
        parse_config({"replicas": named}, "router.yaml")
    assert says in str(caught.value) and "router.yaml" in str(caught.value)


def test_blocks_are_known_as_configured() -> None:
    replicas = [
        {"url": "http://a:1", "kind": "vllm", "block_size": 32, "block_hash_seed": "0"},
        {"url": "http://b:1", "kind": "warmroute"},
        {"url": "http://c:1", "block_hash": "sha256_cbor"},
    ]
    fleet = make_fleet(parse_config({"replicas": replicas}, "x"))
    assert [replica.spec.blocks for replica in fleet.replicas] == [
        BlockSettings(None, 32, "0"),
        BlockSettings("warmroute"),
        BlockSettings("sha256_cbor"),
    ]


def _documented() -> dict[str, str]:
    """Key -> default, as the tables of docs/configuration.md have them."""
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = (line.split("|") for line in text.splitlines() if line.startswith("| `"))
    return {row[1].strip().strip("`"): row[2].strip() for row in rows}


def _keys(section: Section, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def test_every_key_is_documented_with_its_default() -> None:
    config = RouterConfig(
        replicas=(ReplicaConfig(url="http://h:1"),),
        tls=TlsConfig(cert="cert.pem"),
        admin_replicas=AdminReplicasConfig(allow=("10.0.0.0/8",)),
        tracing=TracingConfig(endpoint="http://h:4318/v1/traces"),
        tenants=TenantsConfig(
            salt_secret="0123456789abcdef", members=(TenantConfig(name="acme", keys=("sk-a",)),)
        ),
    )
    assert config.tenants is not None
    keys = {key: value for key, value in _keys(config) if key not in ("replicas", "discovery")}
    keys |= dict(_keys(config.replicas[0], "replicas[]."))
    keys |= dict(_keys(config.tenants.members[0], "tenants.members[]."))
    for source in (
        FileDiscovery(kind="file", path="replicas.yaml"),
        DnsDiscovery(kind="dns", srv="_http._tcp.llm"),
        KubernetesDiscovery(kind="kubernetes", service="llm"),
    ):
        prefix = f"discovery[{source.kind}]."
        keys |= {
            key: value for key, value in _keys(source, prefix) if not key.startswith(f"{prefix}replica.")
        }
        del keys[f"{prefix}kind"]
    keys |= {f"discovery[{kind}].replica": None for kind in ("dns", "kubernetes")}
    documented = _documented()
    assert set(documented) == set(keys)
    for key, value in keys.items():
        if isinstance(value, bool):
            assert documented[key] == str(value).lower(), key
        elif isinstance(value, int | float):
            assert float(documented[key]) == value, key
        elif isinstance(value, str) and not key.endswith(
            (".url", ".cert", ".endpoint", ".path", ".srv", ".service", "members[].name")
        ):
            assert documented[key] == value, key


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize(
    "keys", ["slo: {{ttft_ms: {}}}", "cost: {{prefill_us_per_token: {}}}", "hold: {{max_wait_s: {}}}"]
)
def test_numbers_are_finite(keys: str, number: str, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("replicas: [{url: http://h:1}]\n" + keys.format(number) + "\n")
    with pytest.raises(ConfigError, match="finite"):
        load_config(file)


def test_found_replicas_give_kv_at_their_own_address() -> None:
    source = DnsDiscovery(
        kind="dns", host="prefill", port=8000, kv_source_port=8400, replica={"role": "prefill"}
    )
    assert source.replica_at("10.0.0.7", 8000).kv_source == "10.0.0.7:8400"
    assert source.replica_at("fd00::7", 8000).kv_source == "[fd00::7]:8400"
    assert source.replica_at("10.0.0.7", 8000).role == "prefill"
