"""Measures one replica over HTTP: prefill against length and position, decode steps against batch.

The replica should have nothing else to do. Prompts are made of words nobody has sent before (``salt``), so
they are cold; a prefix that was sent once and goes on otherwise is warm.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import aiohttp
import orjson

from replica.contract.cost_fit import DecodePoint, PrefillPoint
from sim.replay_client import Answer, stream_request
from sim.workload.prompt_text import PromptText

CONNECT_LIMIT_S = 10.0
PATHS = ("/v1/chat/completions", "/v1/completions")
"""Tried in this order: base models have no chat template."""
FIRST_PROMPT_TOKENS = 256
"""By four characters a token; where a token is one character, it is four times that."""
SHORT_PROMPT_TOKENS = 64
REFUSED = ("status 400", "status 413", "status 422")


class CalibrationError(Exception):
    """The replica cannot be measured: what it did, and what to do."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """What is sent."""

    url: str
    model: str
    salt: str
    """New for every run: a prompt that was seen before is not cold."""
    longest_tokens: int = 16_384
    """Of a prompt."""
    repeats: int = 3
    """Per point; the median counts."""
    most_sequences: int = 32
    output_tokens: int = 64
    """Of each stream whose decode steps are timed."""
    silence_limit_s: float = 300.0
    headers: Mapping[str, str] | None = None
    pause_s: float = 0.0
    """Before each prompt: a replica that stood idle answers later than one that is asked without a break."""
    prompt_output_tokens: int = 1
    """Asked for with each prompt whose first token is timed."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What came out."""

    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    notes: tuple[str, ...]
    """What could not be measured, and why."""


Progress = Callable[[str, int, int], None]
"""Called with (job, requests done, requests in all)."""


async def measure(
    settings: MeasureSettings,
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurements:
    """Measure; takes as long as some ninety thousand tokens of prefill with the defaults.

    Raises ``CalibrationError``.
    """
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_LIMIT_S, sock_read=settings.silence_limit_s
    )
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=settings.headers
    ) as session:
        bench = _Bench(settings, session, clock, progress or (lambda job, done, total: None))
        await bench.warm_up()
        prefill = [*await bench.cold(), *await bench.warm()]
        decode = await bench.decode()
    return Measurements(tuple(prefill), tuple(decode), tuple(bench.notes))


class _Bench:
    """One run against one replica."""

    def __init__(
        self,
        settings: MeasureSettings,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self.notes: list[str] = []
        self._settings = settings
        self._session = session
        self._clock = clock
        self._progress = progress
        self._path = PATHS[0]
        self._ignores_eos = True
        self._words = PromptText(16, salt=settings.salt)
        self._longest = 0
        """Tokens of the longest cold prompt that was taken."""

    async def warm_up(self) -> None:
        """Find out how to ask, and how long a token is. The first request often pays for a compilation."""
        first_tokens = max(16, min(FIRST_PROMPT_TOKENS, self._settings.longest_tokens // 8))
        answer = Answer()
        for self._path in PATHS:
            for self._ignores_eos in (True, False):
                answer = await self._send(self._words.prompt((), first_tokens, "warm up"), 2)
                if answer.error is None:
                    break
            if answer.error is None:
                break
        if answer.error is not None:
            raise CalibrationError(
                f"{self._settings.url}: {answer.error} {answer.error_detail}".rstrip()
                + "; expected an OpenAI server that streams chat or text completions"
            )
        if not answer.prompt_tokens:
            raise CalibrationError(
                f"{self._settings.url} tells no usage.prompt_tokens with stream_options.include_usage; "
                "lengths cannot be known"
            )
        characters = self._words_of(first_tokens)
        self._words = PromptText(
            16,
            salt=self._settings.salt,
            characters_per_token=characters / answer.prompt_tokens,
        )

    def _words_of(self, tokens: int) -> int:
        return len(self._words.prompt((), tokens, "length"))

    async def cold(self) -> list[PrefillPoint]:
        """Prompts of several lengths, none seen before."""
        lengths, repeats = cold_lengths(self._settings.longest_tokens), self._settings.repeats
        points: list[PrefillPoint] = []
        for number, length in enumerate(lengths):
            answers = []
            for repeat in range(repeats):
                prompt = self._words.prompt((), length, f"cold {length} {repeat}")
                answer = await self._send(prompt, self._settings.prompt_output_tokens)
                if answer.error in REFUSED and points:
                    self.notes.append(
                        f"a prompt of about {length:,} tokens was refused ({answer.error}); the longest "
                        f"measured has {self._longest:,}"
                    )
                    return points
                answers.append(self._good(answer))
                self._progress("prefill, cold", number * repeats + repeat + 1, len(lengths) * repeats)
            points.append(_point(answers))
            self._longest = max(self._longest, points[-1].new_tokens + points[-1].position)
        return points

    async def warm(self) -> list[PrefillPoint]:
        """A prefix seen once, and new text behind it."""
        shapes, repeats = warm_shapes(self._longest), self._settings.repeats
        points: list[PrefillPoint] = []
        for number, (prefix_tokens, new_tokens) in enumerate(shapes):
            prefix = self._words.prompt((), prefix_tokens, f"prefix {number}")
            self._good(await self._send(prefix, 1))
            answers = []
            for repeat in range(repeats):
                suffix = self._words.prompt((), new_tokens, f"suffix {number} {repeat}")
                answers.append(
                    self._good(await self._send(prefix + suffix, self._settings.prompt_output_tokens))
                )
                self._progress("prefill, warm", number * repeats + repeat + 1, len(shapes) * repeats)
            if any(answer.cached_tokens is None for answer in answers):
                self.notes.append(
                    "the replica does not tell cached_tokens (vLLM: --enable-prompt-tokens-details): what "
                    "attention costs is read from cold prompts alone"
                )
                return []
            if not any(answer.cached_tokens for answer in answers):
                self.notes.append("the replica reports no hit on a prefix just sent: is prefix caching on?")
                return []
            points.append(_point(answers))
        return points

    async def decode(self) -> list[DecodePoint]:
        """Streams side by side, timed while all of them decode."""
        batches = batch_sizes(self._settings.most_sequences)
        points: list[DecodePoint] = []
        for number, sequences in enumerate(batches):
            tries = [await self._step_s(sequences) for _ in range(self._settings.repeats)]
            steps = [seconds for seconds in tries if seconds is not None]
            if len(steps) < len(tries):
                self.notes.append(
                    f"{sequences} streams of {self._settings.output_tokens} tokens did not decode side by "
                    "side; ask for more --output-tokens, or for fewer --most-sequences"
                )
                break
            points.append(DecodePoint(sequences, median(steps)))
            self._progress("decode", sum(batches[: number + 1]), sum(batches))
        return points

    async def _step_s(self, sequences: int) -> float | None:
        times: list[list[float]] = [[] for _ in range(sequences)]
        prompts = [
            self._words.prompt((), SHORT_PROMPT_TOKENS, f"decode {sequences} {stream}")
            for stream in range(sequences)
        ]
        answers = await asyncio.gather(
            *(
                self._send(prompt, self._settings.output_tokens, came.append)
                for prompt, came in zip(prompts, times, strict=True)
            )
        )
        tokens = [
            self._good(answer).output_tokens or len(came) for answer, came in zip(answers, times, strict=True)
        ]
        return step_seconds(times, tokens)

    def _good(self, answer: Answer) -> Answer:
        if answer.error is not None:
            raise CalibrationError(
                f"{self._settings.url}: {answer.error} {answer.error_detail}".rstrip()
                + "; a replica is measured while nothing else uses it, see its log"
            )
        return answer

    async def _send(
        self, prompt: str, output_tokens: int, on_content: Callable[[float], None] | None = None
    ) -> Answer:
        if self._settings.pause_s:
            await asyncio.sleep(self._settings.pause_s)
        body: dict[str, object] = {
            "model": self._settings.model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._path == PATHS[0]:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self._ignores_eos:
            body["ignore_eos"] = True
        url = self._settings.url.rstrip("/") + self._path
        return await stream_request(
            self._session, url, orjson.dumps(body), clock=self._clock, on_content=on_content
        )


def cold_lengths(longest: int) -> list[int]:
    """Prompt lengths to try, in tokens, rising.

    >>> cold_lengths(16_384)
    [64, 256, 1024, 4096, 8192, 16384]
    >>> cold_lengths(100)
    [25, 50, 100]
    """
    lengths = {longest, longest // 2}
    length = longest // 4
    while length >= 64:
        lengths.add(length)
        length //= 4
    if len(lengths) < 3:
        lengths.add(longest // 4)
    return sorted(one for one in lengths if one > 0)


def warm_shapes(longest: int) -> list[tuple[int, int]]:
    """(tokens of the prefix, new tokens behind it).

    >>> warm_shapes(16_384)
    [(8192, 1024), (8192, 4096), (12288, 1024)]
    """
    few, more = max(1, longest // 16), max(1, longest // 4)
    return [(longest // 2, few), (longest // 2, more), (longest * 3 // 4, few)]


def batch_sizes(most: int) -> list[int]:
    """Batches to time.

    >>> batch_sizes(20)
    [1, 2, 4, 8, 16, 20]
    """
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return sizes if sizes[-1] == most else [*sizes, most]


def step_seconds(times: list[list[float]], tokens: list[int]) -> float | None:
    """Seconds of one step while every stream decodes; ``None`` if there is no such time.

    ``times`` are when events with content came, ``tokens`` how many tokens they held in all.

    >>> step_seconds([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]], [4, 8])
    0.6666666666666666
    """
    if not all(times):
        return None
    start, stop = max(came[0] for came in times), min(came[-1] for came in times)
    seconds = steps = 0.0
    for came, count in zip(times, tokens, strict=True):
        within = [one for one in came if start <= one <= stop]
        if len(within) > 1:
            seconds += within[-1] - within[0]
            steps += (len(within) - 1) * count / len(came)
    return seconds / steps if steps and seconds else None


def _point(answers: list[Answer]) -> PrefillPoint:
    """The median of several equal prefills."""
    prompt = median([answer.prompt_tokens or 0 for answer in answers])
    cached = median([answer.cached_tokens or 0 for answer in answers])
    seconds = median([answer.ttft_s or 0.0 for answer in answers])
    return PrefillPoint(max(1, round(prompt - cached)), round(cached), seconds)
