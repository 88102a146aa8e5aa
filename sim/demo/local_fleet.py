"""A fleet on loopback made of child processes: replicas, and one router after another in front of them."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml

from sim.demo.play_script import Message
from sim.demo.processes import Child, ChildError, ChildProcesses, free_ports, warmroute
from sim.replay_client import Answer, stream_request

LOAD_LIMIT_S = 120.0
ROUTER_LIMIT_S = 20.0
RESET_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How every replica of the fleet is started."""

    model: str
    kv_tokens: int
    """Tokens its KV cache holds."""
    step_tokens: int
    """Most tokens in one step; longer prompts are computed in chunks beside running replies."""
    threads: int


@dataclass(frozen=True, slots=True)
class LocalReplica:
    """A running replica."""

    name: str
    url: str
    child: Child


@dataclass(frozen=True, slots=True)
class LocalRouter:
    """A running router."""

    url: str
    admin_url: str
    child: Child


async def start_replicas(
    children: ChildProcesses, folder: Path, count: int, plan: ReplicaPlan, say: Callable[[str], None]
) -> list[LocalReplica]:
    """Start ``count`` replicas side by side and wait until each has its model; raises ``ChildError``."""
    replicas = []
    for number, port in enumerate(free_ports(count), 1):
        name = f"replica-{number}"
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(replica_config(plan, port)), encoding="utf-8")
        threads = str(plan.threads)
        child = children.start(
            name, warmroute("replica", str(config)), {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        )
        replicas.append(LocalReplica(name, f"http://127.0.0.1:{port}", child))

    async def ready(replica: LocalReplica) -> None:
        await children.wait_ready(replica.child, replica.url + "/health", LOAD_LIMIT_S)
        say(f"{replica.name} is ready at {replica.url}")

    await asyncio.gather(*(ready(replica) for replica in replicas))
    return replicas


def replica_config(plan: ReplicaPlan, port: int) -> dict[str, Any]:
    """The config file of a replica on loopback."""
    return {
        "model": plan.model,
        "listen": f"127.0.0.1:{port}",
        "kv_tokens": plan.kv_tokens,
        "max_batched_tokens": plan.step_tokens,
        "threads": plan.threads,
    }


async def start_router(
    children: ChildProcesses,
    folder: Path,
    replicas: Sequence[LocalReplica],
    policy: str,
    seed: int | None = None,
) -> LocalRouter:
    """Start a router that knows nothing yet; ``seed`` breaks ``policy``'s ties. Raises ``ChildError``."""
    listen, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    config = folder / f"router-{policy}.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "listen": listen,
                "admin": admin,
                "replicas": [{"name": replica.name, "url": replica.url} for replica in replicas],
                "policy": {"kind": policy},
                "expose_routing": True,
                "health": {"interval_s": 1.0},
                "seed": seed,
            }
        ),
        encoding="utf-8",
    )
    child = children.start(f"router-{policy}", warmroute("serve", str(config)))
    router = LocalRouter(f"http://{listen}", f"http://{admin}", child)
    await children.wait_ready(child, router.url + "/readiness", ROUTER_LIMIT_S)
    return router


async def forget_prefixes(session: aiohttp.ClientSession, replicas: Sequence[LocalReplica]) -> None:
    """Empty the prefix cache of every replica; raises ``ChildError`` if one does not become idle for it."""
    for replica in replicas:
        deadline = time.monotonic() + RESET_LIMIT_S
        while not await _forget(session, replica):
            if time.monotonic() > deadline:
                raise ChildError(
                    f"{replica.name} still has requests {RESET_LIMIT_S:.0f} s after the last one"
                )
            await asyncio.sleep(0.1)


async def _forget(session: aiohttp.ClientSession, replica: LocalReplica) -> bool:
    async with session.post(replica.url + "/reset_prefix_cache") as answer:
        return bool((await answer.json())["success"])


async def measure_prefill(
    session: aiohttp.ClientSession, replicas: Sequence[LocalReplica], model: str, system: str
) -> float:
    """Seconds of prefill per token on an idle replica: mean over the replicas of one cold ``system`` each.

    A short prompt before, not measured, makes each replica allocate what it needs.
    """
    await asyncio.gather(*(_ask_first(session, replica, model, "Hello!") for replica in replicas))
    costs = []
    for replica in replicas:
        answer = await _ask_first(session, replica, model, system)
        assert answer.ttft_s is not None
        costs.append(answer.ttft_s / ((answer.prompt_tokens or 1) - (answer.cached_tokens or 0)))
    return sum(costs) / len(costs)


async def _ask_first(session: aiohttp.ClientSession, replica: LocalReplica, model: str, says: str) -> Answer:
    answer = await ask(session, replica.url, model, [{"role": "user", "content": says}], max_tokens=2)
    if answer.error is not None:
        raise ChildError(f"{replica.name}: {answer.error} {answer.error_detail}\n{replica.child.tail()}")
    return answer


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, messages: Sequence[Message], max_tokens: int
) -> Answer:
    """A streamed chat answer from the server at ``url``, greedy; errors are in the answer."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return await stream_request(session, url + "/v1/chat/completions", orjson.dumps(body))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
