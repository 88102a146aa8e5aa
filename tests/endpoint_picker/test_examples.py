"""configs/envoy fits together: Envoy, picker and replicas meet; in Kubernetes names, probes and times do."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.config import RouterConfig, load_config, parse_config
from router.endpoint_picker.endpoint_picker import LIVENESS, READINESS
from router.endpoint_picker.endpoints import endpoint_of
from tests.fakes.envoy import CONFIG, Config, cluster_of, filter_of

FOLDER = CONFIG.parent


def endpoints(cluster: Config) -> list[str]:
    (locality,) = cluster["load_assignment"]["endpoints"]
    hosts = [one["endpoint"]["address"]["socket_address"] for one in locality["lb_endpoints"]]
    return [f"{host['address']}:{host['port_value']}" for host in hosts]


def test_envoy_and_picker_meet_and_have_the_same_replicas() -> None:
    envoy, picker = yaml.safe_load(CONFIG.read_text()), load_config(FOLDER / "picker.yaml")
    assert endpoints(cluster_of(envoy, "picker")) == [picker.listen]
    assert endpoints(cluster_of(envoy, "replicas")) == [endpoint_of(one.url) for one in picker.replicas]
    (check,) = cluster_of(envoy, "picker")["health_checks"]
    assert check["grpc_health_check"]["service_name"] in READINESS
    assert float(check["no_traffic_interval"].rstrip("s")) <= 5, (
        "Envoy's own is 60 s: so long would no picker be seen"
    )
    assert filter_of(envoy)["failure_mode_allow"] is False
    assert float(filter_of(envoy)["message_timeout"].rstrip("s")) > picker.hold.max_wait_s
    (listener,) = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert route["route"]["retry_policy"]["num_retries"] == picker.retries.attempts - 1


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(Path(FOLDER / "kubernetes.yaml").read_text())}


@pytest.fixture
def config(objects: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "sk-admin")
    return parse_config(yaml.safe_load(objects["ConfigMap"]["data"]["picker.yaml"]), "picker.yaml")


def test_in_kubernetes_monitoring_reaches_the_admin_port_with_its_key(
    objects: dict[str, Any], config: RouterConfig
) -> None:
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert [variable["name"] for variable in container["env"]] == ["WARMROUTE_ADMIN_KEY"]
    (key,) = config.keys.admin
    assert key.get_secret_value() == "sk-admin"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.admin == f"0.0.0.0:{ports['admin']}"
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    to_gateways, to_monitoring = policy["ingress"]
    assert to_gateways == {"ports": [{"port": "grpc"}]}
    assert to_monitoring["ports"] == [{"port": "admin"}] and to_monitoring["from"]


def test_in_kubernetes_every_object_of_the_core_has_the_form_it_wants(objects: dict[str, Any]) -> None:
    for kind in ("ConfigMap", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        kubernetes_validate.validate(objects[kind], "1.34.0", strict=True)


def test_in_kubernetes_the_pool_names_the_pickers(objects: dict[str, Any], config: RouterConfig) -> None:
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    port, _ = container["ports"]
    (service_port,) = objects["Service"]["spec"]["ports"]
    reference = objects["InferencePool"]["spec"]["endpointPickerRef"]
    assert config.listen.rpartition(":")[2] == str(port["containerPort"])
    assert service_port["targetPort"] == port["name"]
    assert objects["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert (reference["name"], reference["port"]["number"]) == (
        objects["Service"]["metadata"]["name"],
        service_port["port"],
    )
    assert objects["InferencePool"]["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"
    (rule,) = objects["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == objects["InferencePool"]["metadata"]["name"]
    assert container["livenessProbe"]["grpc"] == {"port": port["containerPort"], "service": LIVENESS[1]}
    assert container["readinessProbe"]["grpc"] == {"port": port["containerPort"], "service": READINESS[0]}
    wait_s = config.shutdown_delay_s + config.shutdown_timeout_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait_s
    (mount,) = container["volumeMounts"]
    assert container["args"] == ["endpoint-picker", f"{mount['mountPath']}/picker.yaml"]
