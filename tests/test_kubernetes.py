"""configs/kubernetes fits together: names, ports, labels, probes, and time for streams to end."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.config import RouterConfig, load_config
from tests.fakes.router_rig import RouterRig, with_router

FOLDER = Path(__file__).resolve().parents[1] / "configs/kubernetes"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def kustomization() -> Object:
    loaded: Object = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def objects(kustomization: Object) -> dict[tuple[str, str], Object]:
    found = [
        thing
        for file in kustomization["resources"]
        for thing in yaml.safe_load_all((FOLDER / file).read_text())
    ]
    named = {(thing["kind"], thing["metadata"]["name"]): thing for thing in found}
    assert len(named) == len(found)
    return named


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RouterConfig:
    monkeypatch.setenv("WARMROUTE_ADMIN_KEY", "sk-admin")
    return load_config(FOLDER / "router.yaml")


def _pod(objects: dict[tuple[str, str], Object], name: str) -> Object:
    pod: Object = objects["Deployment", name]["spec"]["template"]
    return pod


def _container(objects: dict[tuple[str, str], Object], name: str) -> Object:
    (container,) = _pod(objects, name)["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_every_file_is_used(kustomization: Object) -> None:
    used = {*kustomization["resources"], "kustomization.yaml"}
    for generator in kustomization["configMapGenerator"]:
        used |= set(generator["files"])
    assert used == {path.name for path in FOLDER.iterdir()}


def test_the_config_is_mounted_where_it_is_read(
    kustomization: Object, objects: dict[tuple[str, str], Object]
) -> None:
    container = _container(objects, "warmroute")
    command, path = container["args"]
    (mount,) = container["volumeMounts"]
    (volume,) = _pod(objects, "warmroute")["spec"]["volumes"]
    (generator,) = kustomization["configMapGenerator"]
    assert command == "serve" and path == f"{mount['mountPath']}/{generator['files'][0]}"
    assert volume["name"] == mount["name"] and volume["configMap"]["name"] == generator["name"]
    assert {image["name"] for image in kustomization["images"]} == {container["image"]}
    asked = set(re.findall(r"\$\{(\w+)\}", (FOLDER / "router.yaml").read_text()))
    assert asked == {variable["name"] for variable in container["env"]}


def test_ports_are_those_of_the_config(objects: dict[tuple[str, str], Object], config: RouterConfig) -> None:
    ports = {port["name"]: port["containerPort"] for port in _container(objects, "warmroute")["ports"]}
    assert config.listen == f"0.0.0.0:{ports['http']}" and config.admin == f"0.0.0.0:{ports['admin']}"
    (public,) = objects["Service", "warmroute"]["spec"]["ports"]
    assert public["targetPort"] == "http"
    assert config.keys.admin, "an admin port that is not on loopback wants a key"
    open_to_all, to_monitoring = objects["NetworkPolicy", "warmroute"]["spec"]["ingress"]
    assert open_to_all == {"ports": [{"port": "http"}]}
    assert to_monitoring["ports"] == [{"port": "admin"}] and to_monitoring["from"]


def test_streams_have_time_to_end(objects: dict[tuple[str, str], Object], config: RouterConfig) -> None:
    spec = _pod(objects, "warmroute")["spec"]
    readiness = _container(objects, "warmroute")["readinessProbe"]
    noticed_s = readiness["periodSeconds"] * readiness["failureThreshold"]
    assert config.shutdown_delay_s > noticed_s
    assert spec["terminationGracePeriodSeconds"] > config.shutdown_delay_s + config.shutdown_timeout_s
    rolling = objects["Deployment", "warmroute"]["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] == 0
    budget = objects["PodDisruptionBudget", "warmroute"]["spec"]
    assert budget["maxUnavailable"] == 1 < objects["Deployment", "warmroute"]["spec"]["replicas"]


def test_an_unready_router_is_not_restarted(objects: dict[tuple[str, str], Object]) -> None:
    container = _container(objects, "warmroute")
    paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in paths.values()} == {"http"}
    assert paths["liveness"]["path"] == paths["startup"]["path"] == "/health"
    assert paths["readiness"]["path"] == "/readiness"


def test_a_real_router_answers_the_probes(
    objects: dict[tuple[str, str], Object], config: RouterConfig
) -> None:
    container = _container(objects, "warmroute")

    async def scenario(rig: RouterRig) -> None:
        for kind in ("startup", "liveness", "readiness"):
            assert (await rig.get(container[f"{kind}Probe"]["httpGet"]["path"])).status == 200, kind

    with_router(scenario, readiness=config.readiness, keys={"public": ["sk-public"]})


def test_selectors_find_their_pods(objects: dict[tuple[str, str], Object]) -> None:
    labels = [_pod(objects, name)["metadata"]["labels"] for kind, name in objects if kind == "Deployment"]
    for (kind, _), thing in objects.items():
        spec = thing.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= one.items() for one in labels) == 1, kind


def test_discovery_may_do_what_it_does_and_no_more(
    objects: dict[tuple[str, str], Object], config: RouterConfig
) -> None:
    (source,) = config.discovery
    assert source.kind == "kubernetes" and source.service and source.namespace is None
    (rule,) = objects["Role", "warmroute"]["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    binding = objects["RoleBinding", "warmroute"]
    assert binding["roleRef"]["name"] == "warmroute"
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) in objects
    assert _pod(objects, "warmroute")["spec"]["serviceAccountName"] == subject["name"]


def test_routers_share_in_the_redis_that_is_there(
    objects: dict[tuple[str, str], Object], config: RouterConfig
) -> None:
    (port,) = objects["Service", "warmroute-redis"]["spec"]["ports"]
    assert config.state.kind == "redis" and config.state.url == f"redis://warmroute-redis:{port['port']}"


def test_redis_is_open_to_all_that_share_through_it_and_to_nobody_else(
    objects: dict[tuple[str, str], Object],
) -> None:
    pickers = yaml.safe_load_all((FOLDER.parent / "envoy/kubernetes.yaml").read_text())
    (picker,) = [one for one in pickers if one["kind"] == "Deployment"]
    sharing = [_pod(objects, "warmroute"), picker["spec"]["template"]]
    policy = objects["NetworkPolicy", "warmroute-redis"]["spec"]
    assert policy["podSelector"]["matchLabels"] == _pod(objects, "warmroute-redis")["metadata"]["labels"]
    (rule,) = policy["ingress"]
    allowed = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert allowed == [pod["metadata"]["labels"] for pod in sharing]


def test_containers_have_no_rights_they_do_not_need(objects: dict[tuple[str, str], Object]) -> None:
    for kind, name in objects:
        if kind == "Deployment":
            pod, container = _pod(objects, name)["spec"], _container(objects, name)
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("version", ["1.28.0", "1.34.0"])
def test_every_object_has_the_form_kubernetes_wants(
    version: str, objects: dict[tuple[str, str], Object]
) -> None:
    """Against the API server's own schemas, no key too many."""
    for thing in objects.values():
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_it_with_the_config_inside() -> None:
    ran = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    built = list(yaml.safe_load_all(ran.stdout))
    (config,) = (thing for thing in built if thing["kind"] == "ConfigMap")
    assert config["data"] == {"router.yaml": (FOLDER / "router.yaml").read_text()}
    (router,) = (
        thing for thing in built if thing["kind"] == "Deployment" and thing["metadata"]["name"] == "warmroute"
    )
    (volume,) = router["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == config["metadata"]["name"] != "warmroute", "a change rolls the pods"
    for thing in built:
        kubernetes_validate.validate(thing, "1.34.0", strict=True)
