"""A fake engine whose work costs what it is told, on a real socket and a clock that only it moves.

Prompts are words of four characters, a token each, behind a template of ``TEMPLATE_TOKENS``. A prefill moves
the clock by what ``prefill`` says, a decode step by what ``decode`` says; the next step waits until every
event of the last one was read, so what a client measures is exact.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from replica.contract.prefill_cost import DecodeCost, PrefillCost

TEMPLATE_TOKENS = 9
BLOCK = 16
LIMIT_S = 20.0


class CountedClock:
    """Virtual seconds; counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


class _Running:
    """One request in the engine."""

    def __init__(
        self, response: web.StreamResponse, new_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        self.response = response
        self.new_tokens = new_tokens
        self.cached_tokens = cached_tokens
        self.left = output_tokens
        self.done = asyncio.Event()


class FakeEngineServer:
    """Serves chat completions one token at a time, all running requests in each step."""

    def __init__(self, clock: CountedClock, prefill: PrefillCost, decode: DecodeCost) -> None:
        self.clock = clock
        self.prefill = prefill
        self.decode = decode
        self.caches = True
        """Keeps prefixes."""
        self.tells_cached = True
        self.tells_usage = True
        self.takes_ignore_eos = True
        self.has_template = True
        self.max_tokens = 1 << 20
        self.most_sequences = 1 << 20
        """More requests at once are refused."""
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self._prompts: list[str] = []
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._engine: asyncio.Task[None] | None = None
        self._expected = 0
        self._ended = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves while inside; gives the base URL."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.authorizations.append(request.headers.get("authorization"))
        return web.json_response({"data": [{"id": "fake", "max_model_len": self.max_tokens}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.has_template:
            return web.json_response({"error": {"message": "no chat template"}}, status=400)
        return await self._answer(request, body, body["messages"][0]["content"])

    async def _text(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"])

    async def _answer(self, request: web.Request, body: dict[str, Any], prompt: str) -> web.StreamResponse:
        self.requests.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        tokens = TEMPLATE_TOKENS + -(-len(prompt) // 4)
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
        if tokens > self.max_tokens:
            return web.json_response({"error": {"message": f"{tokens} tokens are too long"}}, status=400)
        if len(self._waiting) + len(self._running) >= self.most_sequences:
            return web.json_response({"error": {"message": "busy"}}, status=429)
        cached = self._cached(prompt)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self._event(
            response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        )
        running = _Running(response, tokens - cached, cached, body["max_tokens"])
        self._waiting.append(running)
        if self._engine is None:
            self._engine = asyncio.create_task(self._run())
        await running.done.wait()
        if self.tells_usage:
            usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
            if self.tells_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            await self._event(response, {"choices": [], "usage": usage})
        self._ended += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    def _cached(self, prompt: str) -> int:
        """Full blocks of any earlier prompt; the last token is always computed."""
        best = 0
        for earlier in self._prompts if self.caches else ():
            length = 0
            while length < min(len(earlier), len(prompt)) and earlier[length] == prompt[length]:
                length += 1
            best = max(best, length // 4)
        self._prompts.append(prompt)
        return min(best, (len(prompt) - 1) // 4) // BLOCK * BLOCK

    async def _run(self) -> None:
        """Prefill who waits, one after the other; else a step for all who run; until nobody is left."""
        while self._waiting or self._running:
            if self._waiting:
                batch = [self._waiting.pop(0)]
                self.clock.now += self.prefill.seconds(batch[0].new_tokens, batch[0].cached_tokens)
                self._running += batch
            else:
                batch = list(self._running)
                self.clock.now += self.decode.step_seconds(len(batch))
            for one in batch:
                self._expected += 1
                await self._event(one.response, {"choices": [{"index": 0, "delta": {"content": " tok"}}]})
            await self._all_read()
            for one in batch:
                one.left -= 1
                if not one.left:
                    self._running.remove(one)
                    one.done.set()
        self._engine = None

    async def _all_read(self) -> None:
        """Until the client has read the clock for every token so far, every start and every end."""
        async with asyncio.timeout(LIMIT_S):
            while (  # noqa: ASYNC110 - what it waits for is behind a socket
                self.clock.reads < self._expected + len(self.requests) + self._ended
            ):
                await asyncio.sleep(0)

    async def _event(self, response: web.StreamResponse, made: object) -> None:
        await response.write(b"data: " + orjson.dumps(made) + b"\n\n")
