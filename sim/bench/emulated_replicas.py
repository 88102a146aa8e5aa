"""Replicas as GPUs would be, over HTTP: the engine's own scheduler and cache, time in place of a model.

``python -m sim.bench.emulated_replicas SPEED PORT…``: the simulator's replica on a clock that runs SPEED
times as fast as the wall's. Four characters of a prompt are one token. A stream gets its first token when
that is computed and everything else at its end. A client that leaves does not stop the work.
"""

import asyncio
import sys

import orjson
import uvloop

from replica.sequence import Sequence
from sim.bench.server_connection import (
    BAD_REQUEST,
    STREAM_HEAD,
    TOKEN_EVENT,
    ServerConnection,
    completion,
    last_events,
    prompt_text,
)
from sim.event_queue import EventQueue
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica
from sim.step_time.presets import PRESETS

BLOCK_TOKENS = 512
CHARACTERS_PER_TOKEN = 4
STEP_TIME = PRESETS["emufleet"]


class FastClock:
    """Moves an ``EventQueue`` by the event loop's clock, ``speed`` times as fast."""

    def __init__(self, queue: EventQueue, speed: float) -> None:
        self._queue = queue
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def catch_up(self) -> None:
        """Let happen what was due by now."""
        self._queue.run((self._loop.time() - self._began) * self._speed)

    def wind(self) -> None:
        """Events may have been added: wake up when the next is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._queue.next_at
        if due is not None:
            self._timer = self._loop.call_at(self._began + due / self._speed, self._due)

    def _due(self) -> None:
        self.catch_up()
        self.wind()


class _Request:
    """Whom a sequence is for."""

    __slots__ = ("connection", "stream")

    def __init__(self, connection: ServerConnection, *, stream: bool) -> None:
        self.connection = connection
        self.stream = stream


class EmulatedReplica:
    """One replica behind one port."""

    def __init__(self, clock: FastClock, queue: EventQueue) -> None:
        settings = ReplicaSettings()
        self._clock = clock
        self._blocks = settings.capacity_tokens // BLOCK_TOKENS
        events = ReplicaEvents(self._first_token, self._finished, self._refused)
        self._replica = SimulatedReplica(settings.scheduler(BLOCK_TOKENS), STEP_TIME, queue, events)
        self._asked = 0

    def connection(self) -> ServerConnection:
        """For one more connection."""
        return ServerConnection(self._posted, lambda connection: None, self._metrics)

    def _posted(self, connection: ServerConnection, body: bytes) -> None:
        try:
            request = orjson.loads(body)
            text = prompt_text(request)
            most = int(request.get("max_tokens") or request.get("max_completion_tokens") or 16)
        except (ValueError, KeyError, TypeError, AttributeError):
            connection.write(BAD_REQUEST)
            return
        self._asked += 1
        tokens = max(1, len(text) // CHARACTERS_PER_TOKEN)
        sequence = Sequence.of_blocks(
            str(self._asked),
            block_ids(text, tokens // BLOCK_TOKENS),
            tokens,
            most,
            block_size=BLOCK_TOKENS,
            parameters=_Request(connection, stream=bool(request.get("stream"))),
        )
        self._clock.catch_up()
        self._replica.accept(sequence)
        self._clock.wind()

    def _first_token(self, sequence: Sequence) -> None:
        request = _request(sequence)
        if request.stream:
            request.connection.write(STREAM_HEAD + TOKEN_EVENT)

    def _finished(self, sequence: Sequence) -> None:
        request = _request(sequence)
        usage = (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}}'
        ) % (
            sequence.prompt_tokens,
            sequence.output_tokens,
            sequence.prompt_tokens + sequence.output_tokens,
            sequence.cached_tokens,
        )
        request.connection.write(last_events(usage) if request.stream else completion(usage))

    def _refused(self, sequence: Sequence) -> None:
        _request(sequence).connection.write(BAD_REQUEST)

    def _metrics(self) -> bytes:
        """vLLM's names."""
        load = self._replica.load()
        lines = (
            f"vllm:num_requests_running {load.running or 0}",
            f"vllm:num_requests_waiting {load.waiting or 0}",
            f"vllm:kv_cache_usage_perc {load.kv_usage or 0.0}",
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self._blocks}"}} 1',
        )
        return ("\n".join(lines) + "\n").encode()


def block_ids(text: str, count: int) -> list[int]:
    """Names of the first ``count`` blocks of a prompt, each with everything before it."""
    size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    ids: list[int] = []
    before = 0
    for start in range(0, count * size, size):
        before = hash((before, text[start : start + size]))
        ids.append(before)
    return ids


def _request(sequence: Sequence) -> _Request:
    assert isinstance(sequence.parameters, _Request)
    return sequence.parameters


async def serve(speed: float, ports: list[int]) -> None:
    """One replica on each of ``ports`` of loopback, until killed."""
    queue = EventQueue()
    clock = FastClock(queue, speed)
    loop = asyncio.get_running_loop()
    for port in ports:
        replica = EmulatedReplica(clock, queue)
        await loop.create_server(replica.connection, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(float(sys.argv[1]), list(map(int, sys.argv[2:]))))
