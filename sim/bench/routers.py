"""The routers to compare: this one and those installed on the machine, each with its command line."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from sim.bench import envoy
from sim.demo.processes import free_ports, warmroute
from sim.results import Slo

OURS = "warmroute"
SBIN = "/usr/sbin:/usr/local/sbin"
"""Where servers are that a user's PATH may leave out."""

Command = Callable[[str, int, Sequence[str], Path], list[str]]
"""(program, port, replica URLs, folder for its files) -> the command line."""


@dataclass(frozen=True, slots=True)
class Router:
    """One contender and how it is started."""

    name: str
    program: str
    command: Command

    def command_line(self, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
        """Listen on ``port`` of loopback, in front of ``replicas`` (URLs); files go to ``folder``."""
        return self.command(self.program, port, replicas, folder)


@dataclass(frozen=True, slots=True)
class Absent:
    """A rival that is not measured, and why."""

    name: str
    why: str


def ours(
    slo: Slo | None = None,
    policy: str | None = None,
    *,
    admin: int | None = None,
    state: Mapping[str, object] | None = None,
) -> Router:
    """This router, as it runs with this Python, with its defaults; ``admin``: that port, else any.

    With an ``slo`` it also tells where requests went, so that spills and each replica's work can be counted.
    With a ``state`` it shares that with others; with another ``policy`` it bears its name.
    """

    def command(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
        config: dict[str, object] = {
            "listen": f"127.0.0.1:{port}",
            "admin": f"127.0.0.1:{free_ports(1)[0] if admin is None else admin}",
            "replicas": [{"url": url} for url in replicas],
        }
        if slo is not None:
            config["slo"] = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
            config["expose_routing"] = True
        if state is not None:
            config["state"] = dict(state)
        if policy is not None:
            config["policy"] = {"kind": policy}
        path = folder / "router.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return warmroute("serve", str(path))

    return Router(policy or OURS, sys.executable, command)


def _nginx(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
    servers = "\n".join(f"    server {_address(url)};" for url in replicas)
    config = folder / "nginx.conf"
    config.write_text(
        f"""daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/nginx-body;
  proxy_temp_path {folder}/nginx-proxy;
  fastcgi_temp_path {folder}/nginx-fastcgi;
  uwsgi_temp_path {folder}/nginx-uwsgi;
  scgi_temp_path {folder}/nginx-scgi;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000;
  upstream replicas {{
{servers}
    keepalive 512;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
""",
        encoding="utf-8",
    )
    return [program, "-e", "stderr", "-p", str(folder), "-c", str(config)]


def _haproxy(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
    servers = "\n".join(f"  server replica{at} {_address(url)}" for at, url in enumerate(replicas))
    config = folder / "haproxy.cfg"
    config.write_text(
        f"""global
  nbthread 1
  maxconn 8192
defaults
  mode http
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend public
  bind 127.0.0.1:{port}
  default_backend replicas
backend replicas
  balance roundrobin
{servers}
""",
        encoding="utf-8",
    )
    return [program, "-db", "-f", str(config)]


def _rust(policy: str, *options: str) -> Command:
    """The command line that sglang-router, vllm-router and smg have in common."""

    def command(program: str, port: int, replicas: Sequence[str], folder: Path) -> list[str]:
        line = [program, *options, "--host", "127.0.0.1", "--port", str(port)]
        line += ["--policy", policy, "--prometheus-port", str(free_ports(1)[0])]
        return [*line, "--worker-urls", *replicas]

    return command


_SOON = ("--worker-startup-check-interval", "1")
_SGLANG = ("launch", "--log-level", "warn", *_SOON)
_VLLM = ("--log-level", "warning", *_SOON)

RIVALS: tuple[tuple[str, str, Command], ...] = (
    ("nginx round_robin", "nginx", _nginx),
    ("haproxy round_robin", "haproxy", _haproxy),
    ("envoy round_robin", "envoy", envoy.alone),
    ("envoy endpoint-picker, bodies whole", "envoy", envoy.with_picker(envoy.BUFFERED)),
    ("envoy endpoint-picker, bodies in pieces", "envoy", envoy.with_picker(envoy.STREAMED)),
    ("sglang-router round_robin", "sglang-router", _rust("round_robin", *_SGLANG)),
    ("sglang-router cache_aware", "sglang-router", _rust("cache_aware", *_SGLANG)),
    ("vllm-router round_robin", "vllm-router", _rust("round_robin", *_VLLM)),
    ("vllm-router cache_aware", "vllm-router", _rust("cache_aware", *_VLLM)),
    ("smg cache_aware", "smg", _rust("cache_aware", "launch", "--log-level", "warn")),
)
"""(what it is called, its program, its command line)."""


def find_rivals(folder: Path | None) -> tuple[list[Router], list[Absent]]:
    """Rivals whose program is in ``folder`` or on PATH, and those with none.

    In ``folder`` a program P may be P, bin/P, or P/bin/P (a virtual environment each).
    """
    found: list[Router] = []
    absent: list[Absent] = []
    for name, program, command in RIVALS:
        path = _in_folder(folder, program) or _on_path(program)
        if path is not None:
            found.append(Router(name, path, command))
        else:
            where = "on PATH" if folder is None else f"in {folder} or on PATH"
            absent.append(Absent(name, f"no {program} {where}"))
    return found, absent


def _in_folder(folder: Path | None, program: str) -> str | None:
    if folder is None:
        return None
    places = (folder / program / "bin" / program, folder / "bin" / program, folder / program)
    return next((str(place) for place in places if place.is_file() and shutil.which(place)), None)


def _on_path(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=SBIN)


def _address(url: str) -> str:
    return url.removeprefix("http://")
