"""``make compose``: what docker-compose.yml runs, without containers: its commands and configs, on loopback.

Every name of the compose network becomes a port of this machine, and so does every port that a config opens;
the rest of the files is used as it is (the model is ``tiny``, unless told otherwise; Prometheus scrapes each
second). A third router, with tenants, tracing and a request log beside the same config, gives the dashboard's
other panels something to show.

Then: chats through HAProxy, a router that is stopped meanwhile, a replica that is gone, and every query of
the Grafana dashboard and every recording rule asked of the Prometheus that scraped all that; each must give
data.

Exit code 0 if all that held, 1 with what did not.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from json import loads
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from sim.demo.processes import Child, ChildError, ChildProcesses, free_ports, warmroute

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "configs/grafana/dashboards/warmroute.json"
ROUTERS, REPLICAS = ("router-1", "router-2"), ("replica-1", "replica-2", "replica-3")
EXTRA = "router-3"
SIGNING_KEY = "signs-salts-with-more-than-16-characters"
START_LIMIT_S = 120.0
DATA_LIMIT_S = 60.0
MISSING_SHOWN = 10
Services = dict[str, dict[str, Any]]


class Failed(Exception):
    """Something did not hold."""


class ComposeRun:
    """The services of the compose file as processes, and where each of them listens."""

    def __init__(self, children: ChildProcesses, folder: Path, model: str) -> None:
        self._children = children
        self._folder = folder
        self.model = model
        self.services: Services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        names = [f"{name}:{port}" for name in (*ROUTERS, EXTRA) for port in (8080, 8081)]
        names += [f"{name}:8000" for name in REPLICAS]
        names += ["redis:6379", "balancer:8080", "prometheus:9090"]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))

    def address(self, name: str) -> str:
        """Where what the compose network calls ``name`` (HOST:PORT) is here."""
        return f"127.0.0.1:{self.ports[name]}"

    def config(self, service: str, target: str, owner: str | None = None, **changes: Any) -> Path:
        """The file that ``service`` sees as ``target``, as ``owner``'s, with this machine's addresses."""
        (source,) = (
            ROOT / source
            for source, inside, *_ in (volume.split(":") for volume in self.services[service]["volumes"])
            if target.startswith(inside)
            for source in [source + target.removeprefix(inside)]
        )
        text = source.read_text(encoding="utf-8")
        for name in self.ports:
            text = text.replace(name, self.address(name))
        owner = owner or service
        text = re.sub(r"(?:0\.0\.0\.0|(?<=bind )):(\d+)", lambda m: self.address(f"{owner}:{m[1]}"), text)
        if changes:
            text = yaml.safe_dump(yaml.safe_load(text) | changes)
        path = self._folder / owner / source.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def start(self, name: str, command: list[str]) -> Child:
        """One service."""
        return self._children.start(name, command)

    async def start_all(self) -> None:
        """In an order that none of them needs: routers before replicas and Redis."""
        for name in ROUTERS:
            self.start_router(name)
        self.start_router(EXTRA, **_everything(self._folder))
        for name in REPLICAS:
            _, path = self.services[name]["command"]
            salts = {"accept": "signed", "key": SIGNING_KEY}
            config = self.config(name, path, model=self.model, cache_salt=salts)
            self.start(name, warmroute("replica", str(config)))
        port = str(self.ports["redis:6379"])
        self.start("redis", [*self.services["redis"]["command"], "--port", port, "--dir", str(self._folder)])
        haproxy = self.config("balancer", "/usr/local/etc/haproxy/haproxy.cfg")
        self.start("balancer", [*self.services["balancer"]["command"][:-1], str(haproxy)])
        self._start_prometheus()
        for name in (*ROUTERS, EXTRA):
            await self.ready(name)
        await self._ready("balancer", f"http://{self.address('balancer:8080')}/readiness")
        await self._ready("prometheus", f"http://{self.address('prometheus:9090')}/-/ready")

    def start_router(self, name: str, **more: Any) -> Child:
        """A router with the compose file's config and ``more``."""
        service = name if name in self.services else ROUTERS[0]
        _, path = self.services[service]["command"]
        return self.start(name, warmroute("serve", str(self.config(service, path, name, **more))))

    def _start_prometheus(self) -> None:
        folder = "/etc/prometheus"
        config = self.config("prometheus", f"{folder}/prometheus.yml")
        for rules in ("recording.yml", "alerts.yml"):
            self.config("prometheus", f"{folder}/{rules}")
        text = config.read_text().replace("5s", "1s")  # so that a minute is enough
        text = text.replace("targets: [", f"targets: [{self.address(f'{EXTRA}:8081')}, ", 1)
        config.write_text(text)
        _, *options = self.services["prometheus"]["command"]
        options += [f"--web.listen-address={self.address('prometheus:9090')}"]
        options += [f"--storage.tsdb.path={self._folder / 'tsdb'}"]
        self.start("prometheus", ["prometheus", f"--config.file={config}", *options])

    async def ready(self, router: str) -> None:
        """Wait until ``router`` takes requests."""
        await self._ready(router, f"http://{self.address(f'{router}:8080')}/readiness")

    async def _ready(self, name: str, url: str) -> None:
        child = next(one for one in self._children.running if one.name == name)
        await self._children.wait_ready(child, url, START_LIMIT_S)

    def stop(self, name: str) -> None:
        """SIGTERM, as ``docker compose stop`` sends."""
        self._children.stop([one for one in self._children.running if one.name == name], patience_s=40.0)


def _everything(folder: Path) -> dict[str, Any]:
    """What the compose file's config leaves out and the dashboard has panels for."""
    limits = {"requests_per_s": 1}
    return {
        "tenants": {
            "salt_secret": "a-secret-of-more-than-16",
            "salt_signing_key": SIGNING_KEY,
            "routers": 3,
            "members": [{"name": "acme", "keys": ["sk-acme"], "limits": limits}],
        },
        "tracing": {"endpoint": "http://127.0.0.1:9/v1/traces"},
        "log": {"requests": {"file": str(folder / "requests.jsonl")}},
    }


async def _chat(
    session: aiohttp.ClientSession, address: str, model: str, number: int, key: str | None = None
) -> int:
    """One streamed chat; its status. Raises ``Failed`` for a stream without an end."""
    said = f"You are terse and polite. {'Answer from the handbook. ' * 20} Question {number}"
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": said}], "stream": True}
    body |= {"max_tokens": 8, "stream_options": {"include_usage": True}}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with session.post(f"http://{address}/v1/chat/completions", json=body, headers=headers) as answer:
        text = await answer.read()
        if answer.status == 200 and not text.rstrip().endswith(b"data: [DONE]"):
            raise Failed(f"a stream broke off: {text[-200:]!r}")
        return answer.status


async def _load(run: ComposeRun) -> None:
    """Chats, a path that is not there, a tenant over its limit; a router is stopped meanwhile."""
    balancer, extra = run.address("balancer:8080"), run.address(f"{EXTRA}:8080")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as session:
        for number in range(60):
            status = await _chat(session, balancer, run.model, number % 20)
            if status != 200:
                raise Failed(f"chat {number} through HAProxy: {status}")
            if number == 30:
                stopped = asyncio.create_task(asyncio.to_thread(run.stop, ROUTERS[1]))
        await stopped
        run.start_router(ROUTERS[1])
        statuses = [await _chat(session, extra, run.model, number, "sk-acme") for number in range(8)]
        if 429 not in statuses:
            raise Failed(f"the tenant's limit: {statuses}")
        async with session.get(f"http://{balancer}/nowhere") as answer:
            if answer.status != 404:
                raise Failed(f"a path that is not there: {answer.status}")


async def _query(session: aiohttp.ClientSession, run: ComposeRun, expression: str) -> list[Any]:
    url = f"http://{run.address('prometheus:9090')}/api/v1/query"
    async with session.get(url, params={"query": expression}) as answer:
        found = loads(await answer.read())
    if found["status"] != "success":
        raise Failed(f"{expression}: {found.get('error')}")
    return list(found["data"]["result"])


def _expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and what Grafana and Prometheus ask."""
    for panel in loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            asked = target["expr"].replace("$__rate_interval", "1m").replace("$router", ".*")
            yield f"panel {panel['title']}, {target['refId']}", asked
    groups = yaml.safe_load((ROOT / "configs/prometheus/recording.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        yield f"rule {rule['record']}", rule["record"]


async def _until(what: Callable[[], Awaitable[list[Any]]], limit_s: float, says: str) -> None:
    deadline = time.monotonic() + limit_s
    while left := await what():
        if time.monotonic() > deadline:
            raise Failed(f"{says}: {left}")
        await asyncio.sleep(1.0)


async def _checked(run: ComposeRun) -> None:
    async with aiohttp.ClientSession() as session:

        async def silent_targets() -> list[str]:
            rows = await _query(session, run, "up == 0")
            known = await _query(session, run, "up")
            if len(known) < len(ROUTERS) + len(REPLICAS) + 1:
                return ["not all scraped yet"]
            return [row["metric"]["instance"] for row in rows]

        await _until(silent_targets, DATA_LIMIT_S, "targets that are not scraped")
        await _load(run)
        await run.ready(ROUTERS[1])
        run.stop(REPLICAS[2])

        async def empty() -> list[str]:
            return [
                place for place, expression in _expressions() if not await _query(session, run, expression)
            ][:MISSING_SHOWN]

        await _until(empty, DATA_LIMIT_S, "no data for")

        async def unheard() -> list[Any]:
            rows = await _query(session, run, "warmroute_state_peers")
            heard = sorted(row["value"][1] for row in rows)
            return [] if heard == ["2", "2", "2"] else rows

        await _until(unheard, DATA_LIMIT_S, "not every router hears the two others")
    print(f"{sum(1 for _ in _expressions())} expressions of dashboard and rules have data")


async def _main(model: str, folder: Path) -> None:
    with ChildProcesses(folder) as children:
        run = ComposeRun(children, folder, model)
        await run.start_all()
        await _checked(run)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="tiny", help="what the replicas serve (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmroute-compose-") as folder:
        try:
            asyncio.run(_main(args.model, Path(folder)))
        except (ChildError, Failed) as error:
            print(f"compose: {error}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}: {log.read_text(errors='replace')[-600:]}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
