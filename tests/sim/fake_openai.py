"""A small OpenAI-shaped server on a real socket, with faults to order."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]


class FakeOpenAI:
    """Streams ``max_tokens`` tokens, ``tokens_per_event`` (2) in each; ``fault`` may answer otherwise.

    ``received`` has every request's body with the times it came and was answered.
    """

    def __init__(self) -> None:
        self.received: list[Body] = []
        self.keys: set[str | None] = set()
        """``Authorization`` of every request, of those for the model list, too."""
        self.came_s: list[float] = []
        self.answered_s: dict[int, float] = {}
        self.in_flight = 0
        self.most_in_flight = 0
        self.hold_until_in_flight = 0
        """Answer nobody until so many requests are there at once."""
        self.fault: Callable[[int, Body], str | None] = lambda number, body: None
        self.content_after_s = 0.0
        self.tokens_per_event = 2
        self.tells_usage = True
        self.cached_share: Callable[[Body], float] = lambda body: 0.5
        """Of the prompt, as ``usage`` tells it."""
        self.routing_headers: Callable[[int], dict[str, str]] = lambda number: {}
        self._everybody = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serves while inside; gives the base URL."""
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("authorization"))
        body = await request.json()
        number = len(self.received)
        self.received.append(body)
        self.came_s.append(time.perf_counter())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight >= self.hold_until_in_flight:
            self._everybody.set()
        await self._everybody.wait()
        try:
            return await self._answer(request, number, body)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, number: int, body: Body) -> web.StreamResponse:
        fault = self.fault(number, body)
        if fault == "status":
            return web.json_response({"error": {"message": "no"}}, status=503)
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", **self.routing_headers(number)}
        )
        await response.prepare(request)

        def event(made: object) -> Awaitable[None]:
            return response.write(b"data: " + json.dumps(made).encode() + b"\n\n")

        await event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if self.content_after_s:
            await asyncio.sleep(self.content_after_s)
        left = body["max_tokens"]
        while left > 0:
            text = " tok" * min(self.tokens_per_event, left)
            await event({"choices": [{"index": 0, "delta": {"content": text}}]})
            left -= self.tokens_per_event
            if fault == "truncated":
                return response
            if fault == "broken":
                assert request.transport is not None
                request.transport.abort()
                return response
            if fault == "error event":
                await event({"error": {"message": "engine died"}})
                return response
            if fault == "garbage":
                await response.write(b"data: {oops\n\n")
                return response
        if self.tells_usage:
            prompt_tokens = sum(len(message["content"]) for message in body["messages"]) // 4
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": int(prompt_tokens * self.cached_share(body))},
            }
            await event({"choices": [], "usage": usage})
        self.answered_s[number] = time.perf_counter()
        await response.write(b"data: [DONE]\n\n")
        return response
