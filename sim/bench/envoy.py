"""Envoy in front of replicas: alone, and with this project's endpoint picker beside it, in both ways."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from sim.demo.processes import free_ports, warmroute

Command = Callable[[str, int, Sequence[str], Path], list[str]]
Config = dict[str, Any]
BUFFERED = {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}
STREAMED = {
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
BUFFER_BYTES = 64 << 20
LIMITS = {"thresholds": [dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), 20_000)]}


def alone(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
    """Round robin."""
    config = _config(port, replicas)
    config["static_resources"]["clusters"][0]["lb_policy"] = "ROUND_ROBIN"
    return _envoy(program, config, folder)


def with_picker(mode: Config) -> Command:
    """The picker as it runs with this Python, with its defaults; ``mode``: how Envoy sends bodies."""

    def command(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
        picker_port, admin_port = free_ports(2)
        picker = folder / "picker.yaml"
        addresses = {"listen": f"127.0.0.1:{picker_port}", "admin": f"127.0.0.1:{admin_port}"}
        picker.write_text(yaml.safe_dump(addresses | {"replicas": [{"url": url} for url in replicas]}))
        config = _config(port, replicas)
        resources = config["static_resources"]
        resources["clusters"][0]["load_balancing_policy"] = _as_picked()
        resources["clusters"].append(_picker_cluster(picker_port))
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"].insert(0, _picker_filter(mode))
        both = f"{shlex.join(warmroute('endpoint-picker', str(picker)))} & exec " + shlex.join(
            _envoy(program, config, folder)
        )
        return ["/bin/sh", "-c", both]

    return command


def _envoy(program: str, config: Config, folder: Path) -> list[str]:
    path = folder / "envoy.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return [program, "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]


def _typed(name: str, kind: str, **fields: Any) -> Config:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/envoy.{kind}", **fields}}


def _cluster(name: str, addresses: Sequence[str]) -> Config:
    endpoints = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        endpoints.append(
            {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        )
    return {
        "name": name,
        "type": "STATIC",
        "circuit_breakers": LIMITS,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _config(port: int, replicas: Sequence[str]) -> Config:
    route = {"cluster": "replicas", "timeout": "0s"}
    router = _typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="public",
        route_config={
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
        http_filters=[router],
    )
    listener = {
        "name": "public",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{"filters": [manager]}],
    }
    clusters = [_cluster("replicas", [url.removeprefix("http://") for url in replicas])]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _picker_filter(mode: Config) -> Config:
    return _typed(
        "envoy.filters.http.ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        message_timeout="130s",
        processing_mode=mode,
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _as_picked() -> Config:
    def key(name: str) -> Config:
        return {"key": "envoy.lb", "path": [{"key": name}]}

    policies = "extensions.load_balancing_policies"
    spread = _typed("envoy.load_balancing_policies.round_robin", f"{policies}.round_robin.v3.RoundRobin")
    picked = _typed(
        "envoy.load_balancing_policies.override_host",
        f"{policies}.override_host.v3.OverrideHost",
        override_host_sources=[{"metadata": key("x-gateway-destination-endpoint")}],
        selected_host_key=key("x-gateway-destination-endpoint-served"),
        fallback_policy={"policies": [{"typed_extension_config": spread}]},
    )
    return {"policies": [{"typed_extension_config": picked}]}


def _picker_cluster(port: int) -> Config:
    http2 = _typed(
        "",
        "extensions.upstreams.http.v3.HttpProtocolOptions",
        explicit_http_config={"http2_protocol_options": {}},
    )["typed_config"]
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    return _cluster("picker", [f"127.0.0.1:{port}"]) | {"typed_extension_protocol_options": options}
