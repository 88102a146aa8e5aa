"""Sends a trace to a running router with the trace's own timing, and reports what a simulation reports.

Timed traces are open loop: a request is sent when its time has come, whatever became of those before it.
Sessions are closed loop: a turn is sent some thinking after the answer to the one before.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from sim.bounds import ideal_cached_share
from sim.outcome import Outcome
from sim.replay_client import Answer, stream_request
from sim.results import Result, Slo, summarize, warmup_end_s
from sim.workload.arrivals import Arrival, plan_arrivals
from sim.workload.prompt_text import PromptText
from sim.workload.text_sessions import Message, TextSessions
from sim.workload.trace import Trace, TraceRequest

CONNECT_LIMIT_S = 10.0
START_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is sent. ``salt`` has to be new for every run: a router or replica that has seen the same
    prompts in a run before would answer from a warm cache, and that run would be measured, not this one."""

    url: str
    model: str
    salt: str
    other_urls: tuple[str, ...] = ()
    """More routers of the same fleet: requests go to ``url`` and these in turn."""
    headers: Mapping[str, str] | None = None
    """Sent with every request."""
    speed: float = 1.0
    """Timed traces: so many times as fast as recorded; sessions: so many start in a second, and pauses are
    divided by it."""
    seed: int = 1
    characters_per_token: float = 4.0
    max_prompt_tokens: int | None = None
    """The longest made-up prompt is shortened to this and all others in proportion."""
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    """Ask for exactly the recorded output length (``ignore_eos``, understood by vLLM and others)."""
    mean_think_s: float = 1.0
    max_in_flight: int | None = None
    """A request that is due while so many are in flight is not sent, nor are the turns after it: errors."""
    silence_limit_s: float = 300.0
    """A stream that is silent for this long has failed."""
    slo: Slo = field(default_factory=Slo)
    warmup_share: float = 0.25
    cold_prefill_us: float | None = None
    """Microseconds of cold prefill per prompt token, for the SLO; ``None``: taken from the run itself."""
    label: str = "replay"
    clock_speed: float = 1.0
    """Replicas are emulated so many times as fast as they would be: times are told in theirs."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A finished replay: the figures, and how the cold prefill in its SLO was priced."""

    result: Result
    cold_prefill_us: float
    without_usage: int
    """Answers that told no usage: they count as uncached, and have no time per token."""
    outcomes: tuple[Outcome, ...] = ()
    """By position in the plan of arrivals."""
    replicas: tuple[str, ...] = ()
    """Names of those that outcomes count, where the router tells them."""


async def replay(
    trace: Trace,
    settings: ReplaySettings,
    *,
    text: TextSessions | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Replay:
    """Send all of ``trace`` and wait for the last answer. ``text`` has the words, where they were recorded.

    Raises nothing for requests that fail: they are counted.
    """
    sender = _Sender(trace, settings, text, progress)
    await sender.run()
    return sender.replay()


class _Sender:
    """One run: plan, open connections, outcomes."""

    def __init__(
        self,
        trace: Trace,
        settings: ReplaySettings,
        text: TextSessions | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._plan = plan_arrivals(
            trace, rate=settings.speed, seed=settings.seed, mean_think_s=settings.mean_think_s
        )
        self._progress = progress
        self._text = text
        self._words = PromptText(
            trace.block_tokens,
            salt=settings.salt,
            characters_per_token=settings.characters_per_token,
            scale=prompt_scale(trace, settings.max_prompt_tokens),
        )
        self._urls = [
            f"{url.rstrip('/')}/v1/chat/completions" for url in (settings.url, *settings.other_urls)
        ]
        self._answers: list[tuple[float, float, Answer] | None] = [None] * len(self._plan)
        """(sent, how late, what came back) by position."""
        self._done = 0
        self._in_flight = 0
        self._session: aiohttp.ClientSession
        self._start_s = 0.0
        self._cpu_share = 0.0
        self._ceiling_per_s = 0.0

    async def run(self) -> None:
        """Send everything; returns when the last answer is complete."""
        starts = [k for k, arrival in enumerate(self._plan) if arrival.at_s is not None]
        starts.sort(key=lambda k: self._plan[k].at_s or 0.0)
        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_LIMIT_S, sock_read=self._settings.silence_limit_s
        )
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=limits, headers=self._settings.headers
        )
        async with self._session:
            self._start_s = time.perf_counter() + START_AFTER_S
            began: tuple[float, float] | None = None  # what is made ready before the first is no load
            async with asyncio.TaskGroup() as tasks:
                for position in starts:
                    body = self._body(position)  # ahead of its time, so that writing it delays nobody
                    due_s = self._start_s + (self._plan[position].at_s or 0.0)
                    await _sleep_until(due_s)
                    began = began or (time.process_time(), time.perf_counter())
                    most = self._settings.max_in_flight
                    if most is not None and self._in_flight >= most:
                        self._leave_out(position, due_s)
                        continue
                    self._in_flight += 1
                    tasks.create_task(self._follow(position, body, due_s), name=f"replay {position}")
            if began is not None:
                cpu_s, wall_s = time.process_time() - began[0], time.perf_counter() - began[1]
                self._cpu_share = cpu_s / wall_s
                self._ceiling_per_s = len(self._plan) / cpu_s

    def _leave_out(self, position: int, due_s: float) -> None:
        """Count a request that is not sent, and the turns after it, as errors: they would have waited."""
        at: int | None = position
        while at is not None:
            skipped = Answer(error=f"not sent: {self._in_flight} were in flight")
            self._answers[at] = (due_s - self._start_s, 0.0, skipped)
            self._done += 1
            at = self._plan[at].next_turn

    async def _follow(self, position: int, body: bytes, due_s: float) -> None:
        """Send one request, which is in flight already, and the turns that follow its answer."""
        at: int | None = position
        while at is not None:
            sent_s = time.perf_counter()
            answer = await stream_request(self._session, self._urls[at % len(self._urls)], body)
            self._in_flight -= 1
            self._answers[at] = (sent_s - self._start_s, sent_s - due_s, answer)
            self._done += 1
            if self._progress is not None:
                self._progress(self._settings.label, self._done, len(self._plan))
            answered_s = time.perf_counter()
            at = self._plan[at].next_turn
            if at is not None:
                body = self._body(at)
                due_s = answered_s + self._plan[at].think_s / self._settings.speed
                await _sleep_until(due_s)
                self._in_flight += 1

    def _body(self, position: int) -> bytes:
        request = self._plan[position].request
        return orjson.dumps(request_body(self._settings, request, self._messages(position)))

    def _messages(self, position: int) -> list[Message]:
        request = self._plan[position].request
        if self._text is None:
            return made_up_messages(self._words, request, position)
        messages = self._text.messages(position)
        salted = f"[run {self._settings.salt}]\n{messages[0]['content']}"
        return [{"role": messages[0]["role"], "content": salted}, *messages[1:]]

    def replay(self) -> Replay:
        """The figures of a finished run."""
        names: dict[str, int] = {}
        outcomes = []
        for arrival, sent in zip(self._plan, self._answers, strict=True):
            assert sent is not None, "a request was never sent"
            outcomes.append(_outcome(arrival, *sent, names, self._settings.clock_speed))
        settings = self._settings
        cold_us = settings.cold_prefill_us
        if cold_us is None:
            cold_us = estimate_cold_prefill_us(outcomes)
        cold_s_per_token = cold_us / 1e6
        result = summarize(
            settings.label,
            outcomes,
            replicas=len(names) or None,
            slo=settings.slo,
            cold_prefill_s=lambda tokens: cold_s_per_token * tokens,
            warmup_share=settings.warmup_share,
            ideal=self._ideal(outcomes),
            reports_send_lag=True,
        )
        counted = [
            sent[2] for sent in self._answers if sent and sent[2].output_tokens and sent[2].content_events
        ]
        events = sum(answer.content_events for answer in counted)
        result = replace(
            result,
            client_cpu_share=self._cpu_share,
            client_ceiling_per_s=self._ceiling_per_s,
            tokens_per_event=sum(answer.output_tokens or 0 for answer in counted) / events
            if events
            else None,
            clumped_share=sum(answer.clumped_events for answer in counted) / events if events else None,
        )
        without_usage = sum(
            1 for sent in self._answers if sent and sent[2].error is None and sent[2].output_tokens is None
        )
        return Replay(result, cold_us, without_usage, tuple(outcomes), tuple(names))

    def _ideal(self, outcomes: Sequence[Outcome]) -> float | None:
        measured_from_s = warmup_end_s(outcomes, self._settings.warmup_share)
        by_time = sorted(range(len(outcomes)), key=lambda k: outcomes[k].sent_s)
        return ideal_cached_share(
            (
                (request.block_ids, request.prompt_tokens, outcomes[k].sent_s >= measured_from_s)
                for k in by_time
                for request in (self._plan[k].request,)
            ),
            self._trace.block_tokens,
        )


def request_body(
    settings: ReplaySettings, request: TraceRequest, messages: Sequence[Message]
) -> dict[str, Any]:
    """What is sent to ask for ``request``, whose prompt is ``messages``."""
    output_tokens = request.output_tokens
    if settings.max_output_tokens is not None:
        output_tokens = min(output_tokens, settings.max_output_tokens)
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": list(messages),
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    return body


def made_up_messages(words: PromptText, request: TraceRequest, position: int) -> list[Message]:
    """The prompt of the request at ``position`` in the plan, where a trace tells block ids alone."""
    prompt = words.prompt(request.block_ids, request.prompt_tokens, str(position))
    return [{"role": "user", "content": prompt}]


def prompt_scale(trace: Trace, max_prompt_tokens: int | None) -> float:
    """By how much prompts are shortened so that the longest has ``max_prompt_tokens``; 1 if none has more."""
    longest = max(request.prompt_tokens for request in trace.requests)
    return 1.0 if max_prompt_tokens is None else min(1.0, max_prompt_tokens / longest)


def estimate_cold_prefill_us(outcomes: Sequence[Outcome]) -> float:
    """Microseconds of prefill per token of this fleet: the fastest tenth of long, mostly uncached prompts.

    Time to first token over computed tokens, so queueing is in it: on an overloaded fleet it is too high,
    and the share in SLO is flattered. 0 when there is nothing to go by.
    """
    cold = [
        (outcome.prompt_tokens - outcome.cached_tokens, outcome.ttft_s)
        for outcome in outcomes
        if outcome.error is None
        and outcome.ttft_s is not None
        and outcome.cached_tokens * 2 <= outcome.prompt_tokens
    ]
    cold.sort(key=lambda pair: pair[0])
    rates = sorted(ttft_s / computed for computed, ttft_s in cold[len(cold) // 2 :] if computed > 0)
    return 1e6 * rates[len(rates) // 10] if rates else 0.0


def _outcome(
    arrival: Arrival, sent_s: float, lag_s: float, answer: Answer, names: dict[str, int], clock_speed: float
) -> Outcome:
    replica = None if answer.replica is None else names.setdefault(answer.replica, len(names))
    told = answer.prompt_tokens
    return Outcome(
        sent_s=sent_s * clock_speed,
        prompt_tokens=arrival.request.prompt_tokens if told is None else told,
        output_tokens=answer.output_tokens or 0,
        cached_tokens=answer.cached_tokens or 0,
        ttft_s=None if answer.ttft_s is None else answer.ttft_s * clock_speed,
        e2e_s=answer.e2e_s * clock_speed,
        replica=replica,
        spilled=answer.reason == "spill",
        error=answer.error,
        send_lag_s=max(0.0, lag_s) * clock_speed,
    )


async def _sleep_until(due_s: float) -> None:
    left_s = due_s - time.perf_counter()
    if left_s > 0:
        await asyncio.sleep(left_s)
