"""Runs the engine in a thread of its own; the event loop hands it requests and gets deltas back.

Everything the engine owns is touched in its thread only. What goes in are commands in a queue; what comes
out are lists of deltas, one wake-up of the event loop per step.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, TypeVarTuple

import torch

from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.engine import Engine
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.kv_cache.tier_settings import TierCounters
from replica.request import Delta, Request

log = logging.getLogger("warmroute.replica")

_Command = Callable[[Engine], None]
Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")
IDLE_S = 0.02
"""Nothing to do for so long: time to prepare. The next request of a client often comes sooner."""
EventSink = Callable[[float, Sequence[CacheEvent]], None]
"""Takes the cache events of one step and when it ended, in seconds since 1970; called on the event loop."""


class EngineDead(RuntimeError):
    """The engine has stopped; the message says why."""


class ReplyStream:
    """The deltas of the sequences of one request; leave it (``close``) and what still runs is aborted."""

    def __init__(self, thread: "EngineThread", request_ids: Sequence[str]) -> None:
        self._thread = thread
        self._deltas: asyncio.Queue[Delta | EngineDead] = asyncio.Queue()
        self._unfinished = set(request_ids)

    def put(self, delta: Delta | EngineDead) -> None:
        """Called on the event loop by the engine's thread."""
        self._deltas.put_nowait(delta)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas in order until every sequence is finished.

        Raises:
            EngineDead: the engine died before that.
        """
        while self._unfinished:
            delta = await self._deltas.get()
            if isinstance(delta, EngineDead):
                raise delta
            if delta.finish_reason is not None:
                self._unfinished.discard(delta.request_id)
            yield delta

    def close(self) -> None:
        """Abort what is not finished."""
        self._thread.forget(self._unfinished)
        self._unfinished = set()


class EngineThread:
    """Owns the engine's thread. All methods are for the event loop that was running at ``start``."""

    def __init__(self, engine: Engine, threads: int | None, event_sink: EventSink | None = None) -> None:
        """``threads``: cores for the model's arithmetic; ``None`` keeps torch's own choice."""
        self._engine = engine
        self._threads = threads
        self._event_sink = event_sink
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, ReplyStream] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load = engine.load()
        self._preemptions = 0
        # Requests so far, counted where they leave and where they arrive: one thread each.
        self._submitted = self._taken = 0
        self._turn_began_s: float | None = None
        self.failure: str | None = None
        """Why the engine died; ``None`` while it lives."""
        self.died = asyncio.Event()

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, patience_s: float | None = None) -> bool:
        """End the thread after its current step; requests still in it end as aborted streams.

        False: the step took longer than ``patience_s`` (None: waits for ever), and the thread is left in it.
        """
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, patience_s)
        self.failure = self.failure or "the replica is shutting down"
        self._end_streams(EngineDead(self.failure))
        return not self._thread.is_alive()

    @property
    def load(self) -> LoadReport:
        """The engine's load after its last step; requests on their way to it count as waiting."""
        return self._load

    @property
    def handed_over(self) -> int:
        """Requests on their way to the engine."""
        return self._submitted - self._taken

    @property
    def turn_s(self) -> float:
        """How long the step under way has been taking; 0 while there is nothing to do."""
        began_s = self._turn_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def preemptions(self) -> int:
        """Counter: preemptions so far."""
        return self._preemptions

    @property
    def states(self) -> StateCheckpoints | None:
        """Recurrent states, to be read only; None for a model without any."""
        return self._engine.states

    @property
    def tier_counters(self) -> TierCounters | None:
        """What became of blocks on lower tiers; None without any."""
        return self._engine.tier_counters

    def submit(self, requests: Sequence[Request]) -> ReplyStream:
        """Hand requests over; iterate over the result for their deltas, and close it.

        Raises:
            EngineDead: there is no engine any more.
        """
        if self.failure is not None:
            raise EngineDead(self.failure)
        stream = ReplyStream(self, [request.request_id for request in requests])
        for request in requests:
            self._streams[request.request_id] = stream
        self._submitted += len(requests)
        self._commands.put(lambda engine: self._add(engine, requests))
        return stream

    def forget(self, request_ids: set[str]) -> None:
        """Abort these requests and drop their streams."""
        gone = [name for name in request_ids if self._streams.pop(name, None) is not None]

        def abort(engine: Engine) -> None:
            for name in gone:
                engine.abort(name)

        if gone:
            self._commands.put(abort)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests run.

        Raises:
            EngineDead: there is no engine any more.
        """
        return await self.ask(Engine.reset_prefix_cache)

    async def ask(self, question: Callable[[Engine], Answer]) -> Answer:
        """What ``question`` returns in the engine's thread, between two steps.

        Raises:
            EngineDead: there is no engine any more.
        """
        if self.failure is not None:
            raise EngineDead(self.failure)
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def answer(engine: Engine) -> None:
            self._call(_settle, done, question(engine))

        self._commands.put(answer)
        waits = asyncio.ensure_future(self.died.wait())
        try:
            await asyncio.wait((done, waits), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise EngineDead(self.failure or "the engine stopped")
            return done.result()
        finally:
            waits.cancel()

    # In the engine's thread

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while self._obey_commands():
                deltas = self._engine.step() if self._engine.has_work else []
                self._load = self._engine.load()
                self._preemptions = self._engine.preemptions
                events = self._engine.take_events()
                if events and self._event_sink is not None:
                    self._call(self._event_sink, time.time(), events)
                if deltas:
                    self._call(self._deliver, deltas)
        except BaseException as error:
            log.exception("the engine died")
            message = f"the engine died: {type(error).__name__}: {error}"
            self._call(self._die, message)
        finally:
            self._engine.close()

    def _obey_commands(self) -> bool:
        """Run what has come in; wait for something when idle. False: stop."""
        wait = not self._engine.has_work
        self._turn_began_s = None if wait else time.monotonic()
        while True:
            try:
                command = self._wait_for_command() if wait else self._commands.get_nowait()
            except queue.Empty:
                return True
            self._turn_began_s = time.monotonic()
            if command is None:
                return False
            command(self._engine)
            wait = False

    def _wait_for_command(self) -> _Command | None:
        """The next one; if it is long in coming, the engine prepares meanwhile."""
        patience_s = IDLE_S
        while True:
            try:
                return self._commands.get(timeout=patience_s)
            except queue.Empty:
                if not self._engine.prepare():
                    return self._commands.get()
            patience_s = 0.0

    def _add(self, engine: Engine, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                engine.add(request)
            except Exception as error:  # it must not take the engine with it
                if not isinstance(error, ValueError):
                    log.exception("request %s cannot begin", request.request_id)
                    engine.abort(request.request_id)
                refusal = Delta(
                    request.request_id,
                    "",
                    (),
                    len(request.prompt),
                    0,
                    0,
                    finish_reason="error",
                    error=str(error),
                )
                self._call(self._deliver, [refusal])
        self._load = engine.load()
        self._taken += len(requests)

    def _call(self, what: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(what, *arguments)
        except RuntimeError:
            self._commands.put(None)  # the event loop is closed: nobody is there to tell

    # On the event loop

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
            stream.put(delta)

    def _die(self, message: str) -> None:
        self.failure = message
        self.died.set()
        self._end_streams(EngineDead(message))

    def _end_streams(self, reason: EngineDead) -> None:
        for stream in set(self._streams.values()):
            stream.put(reason)
        self._streams.clear()


def _settle(done: asyncio.Future[Answer], answer: Answer) -> None:
    if not done.done():
        done.set_result(answer)
