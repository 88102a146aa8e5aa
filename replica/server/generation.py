"""One request through the engine: a whole answer or a stream of events, aborted when the client goes."""

import time
from dataclasses import dataclass

from aiohttp import hdrs, web

from replica.request import Delta, Request
from replica.server.answers import AnswerForm, Choice, usage
from replica.server.client_error import error_body
from replica.server.engine_thread import EngineDead, EngineThread, ReplyStream
from replica.server.metrics import ReplicaMetrics
from replica.server.prompts import Prompt
from replica.server.settings import Settings
from replica.server.wire import RequestFailed, event, json_answer


@dataclass(frozen=True, slots=True)
class Job:
    """A request, read and checked."""

    prompts: tuple[Prompt, ...]
    settings: Settings
    requests: tuple[Request, ...]


async def answer(
    http: web.Request,
    job: Job,
    form: AnswerForm,
    thread: EngineThread,
    metrics: ReplicaMetrics,
    arrival: float,
) -> web.StreamResponse:
    """Generate and answer. Whatever ends this early (also the client's leaving) aborts the sequences.

    Raises:
        EngineDead: the engine died before the answer began.
        RequestFailed: this request failed before the answer began.
    """
    exchange = _Exchange(job, form, _Watch(metrics, arrival, len(job.requests)))
    stream = thread.submit(job.requests)
    try:
        if job.settings.stream:
            return await exchange.streamed(http, stream)
        return await exchange.whole(stream)
    finally:
        stream.close()
        exchange.watch.close()


class _Exchange:
    """The choices of one request as they grow."""

    def __init__(self, job: Job, form: AnswerForm, watch: "_Watch") -> None:
        self.watch = watch
        self._form = form
        self._settings = job.settings
        self._choices = [Choice() for _ in job.requests]
        self._index_of = {one.request_id: index for index, one in enumerate(job.requests)}

    async def whole(self, stream: ReplyStream) -> web.Response:
        """The answer at once."""
        async for delta in stream:
            self._choices[self._checked(delta)].take(delta)
        return json_answer(self._form.whole(self._choices, self._usage()))

    async def streamed(self, http: web.Request, stream: ReplyStream) -> web.StreamResponse:
        """Deltas as events. Headers go out with the first, so that an early failure is a plain 500."""
        response = web.StreamResponse(
            headers={hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8", hdrs.CACHE_CONTROL: "no-cache"}
        )
        opened: set[int] = set()
        try:
            async for delta in stream:
                index = self._checked(delta)
                choice = self._choices[index]
                events = [] if index in opened else self._form.opening(index)
                opened.add(index)
                events.append(self._form.delta(index, delta, len(choice.text)))
                choice.take(delta)
                if not response.prepared:
                    await response.prepare(http)
                await response.write(b"".join(event(one) for one in events))
            closing = b"data: [DONE]\n\n"
            if self._settings.stream_usage:
                closing = event({**self._form.chunk([]), "usage": self._usage()}) + closing
            await response.write(closing)
            await response.write_eof()
        except (RequestFailed, EngineDead) as failure:
            if not response.prepared:
                raise
            # Never disguised: an error event, and then the connection breaks without the end of the body.
            await response.write(event(error_body(str(failure), "InternalServerError", 500)))
            if http.transport is not None:
                http.transport.close()
        except ConnectionResetError:
            pass  # the client is gone
        return response

    def _checked(self, delta: Delta) -> int:
        """The index of the choice a delta belongs to; RequestFailed when it failed."""
        index = self._index_of[delta.request_id]
        self.watch.saw(index, delta)
        if delta.error is not None:
            raise RequestFailed(delta.error)
        return index

    def _usage(self) -> dict[str, object]:
        return usage(self._choices, self._settings.choices)


class _Watch:
    """Times one request for the metrics."""

    def __init__(self, metrics: ReplicaMetrics, arrival: float, sequences: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._latest: list[float | None] = [None] * sequences
        self._unfinished = sequences

    def saw(self, index: int, delta: Delta) -> None:
        """A delta of this sequence arrived."""
        now = time.monotonic()
        latest, self._latest[index] = self._latest[index], now
        if delta.error is not None:
            pass
        elif latest is None:
            self._metrics.first_tokens(delta.prompt_tokens, len(delta.tokens), now - self._arrival)
        else:
            self._metrics.more_tokens(len(delta.tokens), now - latest)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._metrics.finished(delta.finish_reason, now - self._arrival)

    def close(self) -> None:
        """Sequences that did not finish were aborted."""
        for _ in range(self._unfinished):
            self._metrics.finished("abort", time.monotonic() - self._arrival)
