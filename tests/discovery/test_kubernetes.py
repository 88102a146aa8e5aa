"""Replicas from a Kubernetes API server: list, watch, bookmarks, 410, expired tokens, broken connections."""

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from router.config_errors import ConfigError
from router.discovery import kubernetes_api
from router.discovery.discovery import make_source
from router.discovery.endpoints import PortUnknown, ready_pod
from router.discovery_config import KubernetesDiscovery
from tests.discovery.changing_fleet import names, run, traffic, until_there_are
from tests.fakes.fake_kubernetes import FakeKubernetes, endpoint_slice, pod
from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig

HOST = "127.0.0.1"
TLS = Path(__file__).parent.parent / "fakes" / "tls"


def with_api(
    scenario: Callable[[RouterRig, FakeKubernetes], Awaitable[None]], folder: Path, **settings: Any
) -> None:
    """With r0 configured, and the rest as the API server says."""
    token = folder / "token"
    token.write_text("first\n")

    async def inner(rig: RouterRig) -> None:
        api = FakeKubernetes()
        await api.start()
        source = {"kind": "kubernetes", "namespace": "prod", "api": api.url, "token_file": str(token)}
        try:
            await rig.reload(rig.entry(0), discovery=[source | settings])
            await until(lambda: api.open_watches >= 1)
            await scenario(rig, api)
        finally:
            await api.stop()

    run(inner)


def slice_of(rig: RouterRig, number: int, **conditions: bool) -> dict[str, Any]:
    return endpoint_slice(HOST, rig.replicas[number].port, f"vllm-{number}", **conditions)


def test_endpoints_become_ready_terminate_and_go_while_requests_go_on(tmp_path: Path) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        async with traffic(rig):
            await api.put("a", slice_of(rig, 1, ready=False))
            await api.put("b", slice_of(rig, 2))
            await until_there_are(rig, "r0", "vllm-2")
            await api.put("a", slice_of(rig, 1))
            await until_there_are(rig, "r0", "vllm-1", "vllm-2")
            await api.put("b", slice_of(rig, 2, terminating=True))
            await until_there_are(rig, "r0", "vllm-1")
            await api.delete("a")
            await until_there_are(rig, "r0")
        assert api.lists == ["kubernetes.io/service-name=vllm"]

    with_api(scenario, tmp_path, service="vllm")


def test_pods_by_label(tmp_path: Path) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        ports = [replica.port for replica in rig.replicas]
        await api.put("llm-1", pod(HOST, ports[1], ready=False))
        await api.put("llm-2", pod(HOST, ports[2]))
        await until_there_are(rig, "r0", "llm-2")
        await api.put("llm-1", pod(HOST, ports[1]))
        await until_there_are(rig, "r0", "llm-1", "llm-2")
        await api.put("llm-2", pod(HOST, ports[2], deleted=True))
        await until_there_are(rig, "r0", "llm-1")
        assert api.lists == ["app=llm"]

    with_api(scenario, tmp_path, pods="app=llm", port="http")


def test_a_broken_watch_goes_on_where_it_was_and_after_410_the_list_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        await api.put("a", slice_of(rig, 1))
        await until_there_are(rig, "r0", "vllm-1")
        await api.bookmark()
        await api.put("a", slice_of(rig, 1))
        at = str(api.version)
        async with traffic(rig):
            await until(lambda: _seen(rig, api))
            api.cut_watches()
            await until(lambda: api.watches[-1] == at and api.open_watches >= 1)
            assert len(api.lists) == 1
            api.objects["b"] = slice_of(rig, 2)  # while nobody watches
            api.version += 5
            api.forget()
            api.cut_watches()
            await until_there_are(rig, "r0", "vllm-1", "vllm-2")
            assert len(api.lists) == 2
            await api.send({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
            await until(lambda: len(api.lists) == 3 and api.watches[-1] == str(api.version))
            assert names(rig) == {"r0", "vllm-1", "vllm-2"}
        assert not [one for one in caplog.records if one.name == "warmroute.discovery"]  # all as it should be

    def _seen(rig: RouterRig, api: FakeKubernetes) -> bool:
        (running,) = rig.router.discovery.running
        found = running.source._objects["a"]  # type: ignore[attr-defined]
        return bool(found["metadata"]["resourceVersion"] == str(api.version))

    with_api(scenario, tmp_path, service="vllm")


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "MODIFIED", "obj\n',
        b"<html>502 Bad Gateway</html>\n",
        b"null\n",
        b'{"type": "MODIFIED", "object": "text"}\n',
        b'{"type": "ERROR", "object": []}\n',
        b'{"type": "MODIFIED", "object": {"metadata": null}}\n',
    ],
)
def test_what_is_not_understood_is_said_and_changes_nothing(
    line: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        await api.put("a", slice_of(rig, 1))
        await until_there_are(rig, "r0", "vllm-1")
        await api.send_line(line)
        await until(lambda: any("answer is not understood" in text for text in caplog.messages))
        await api.put("b", slice_of(rig, 2))
        await until_there_are(rig, "r0", "vllm-1", "vllm-2")

    with_api(scenario, tmp_path, service="vllm")


def test_an_expired_token_is_read_again_and_meanwhile_nothing_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        await api.put("a", slice_of(rig, 1))
        await until_there_are(rig, "r0", "vllm-1")
        api.token = "second"
        api.cut_watches()
        await until(lambda: api.refused >= 2)
        assert names(rig) == {"r0", "vllm-1"}
        assert sum("the token in" in line for line in caplog.messages) == 1
        (report,) = (await rig.admin("/fleet")).json()["discovery"]
        assert "401" in report["failure"]
        api.objects["b"] = slice_of(rig, 2)
        (tmp_path / "token").write_text("second\n")
        await until_there_are(rig, "r0", "vllm-1", "vllm-2")

    with_api(scenario, tmp_path, service="vllm")


def test_the_list_is_read_again_every_now_and_then(tmp_path: Path) -> None:
    async def scenario(rig: RouterRig, api: FakeKubernetes) -> None:
        api.objects["a"] = slice_of(rig, 1)  # an event that is never told
        await until_there_are(rig, "r0", "vllm-1")
        assert rig.router.discovery.report()[0].failure is None

    with_api(scenario, tmp_path, service="vllm", resync_s=0.2)


def test_inside_a_cluster_nothing_but_the_service_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("prod\n")
    (tmp_path / "ca.crt").write_bytes((TLS / "rsa_cert.pem").read_bytes())
    monkeypatch.setattr(kubernetes_api, "ACCOUNT", tmp_path)

    async def scenario(rig: RouterRig) -> None:
        api = FakeKubernetes()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")
        await api.start(context)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", HOST)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        try:
            api.objects["a"] = slice_of(rig, 1)
            await rig.reload(rig.entry(0), discovery={"kind": "kubernetes", "service": "vllm"})
            await until(
                lambda: "CERTIFICATE_VERIFY_FAILED" in (rig.router.discovery.report()[0].failure or "")
            )
            assert names(rig) == {"r0"}
            (tmp_path / "ca.crt").write_bytes((TLS / "cert.pem").read_bytes())
            await until_there_are(rig, "r0", "vllm-1")
        finally:
            await api.stop()

    run(scenario)


def test_outside_of_a_cluster_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="not in a pod"):
        make_source(KubernetesDiscovery(kind="kubernetes", service="a", namespace="b"))
    with pytest.raises(ConfigError, match="set namespace"):
        make_source(KubernetesDiscovery(kind="kubernetes", service="a", api="http://h:1"))


def test_a_port_that_cannot_be_told_is_named() -> None:
    for wanted in (None, "grpc"):
        with pytest.raises(PortUnknown, match="there are: http 8000, kv 5557"):
            list(ready_pod({**pod(HOST, 8000), "metadata": {"name": "a"}}, wanted))
    (found,) = ready_pod({**pod(HOST, 8000), "metadata": {"name": "a"}}, 9000)
    assert found.port == 9000
