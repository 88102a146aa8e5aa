"""The HTTP routes: OpenAI's, vLLM's extras, health and metrics."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson
from aiohttp import hdrs, web

from replica.contract.kv_source import KV_SOURCE_HEADER
from replica.kv_cache.tier_transport import PeerOffer
from replica.model.load import LoadedModel
from replica.peers.source_rule import SourceRule
from replica.server.answers import ChatAnswer, CompletionAnswer
from replica.server.client_error import ClientError, error_body
from replica.server.content_encoding import decoded
from replica.server.engine_thread import EngineThread
from replica.server.fields import Fields
from replica.server.generation import Job, answer
from replica.server.metrics import ReplicaMetrics
from replica.server.prompts import Prompt, PromptReader
from replica.server.salt_rule import SaltRule
from replica.server.settings import Settings, chat_settings, completion_settings, sequences_of
from replica.server.wire import json_answer

Result = TypeVar("Result")

LONG_BODY = 65_536
"""Bodies longer than this, once they are decoded, are tokenized off the event loop."""


class ReplicaRoutes:
    """Handlers over one model and its engine."""

    def __init__(
        self,
        model: LoadedModel,
        name: str,
        thread: EngineThread,
        prompts: PromptReader,
        metrics: ReplicaMetrics,
        sources: SourceRule | None = None,
        salts: SaltRule | None = None,
        hang_s: float = 60.0,
    ) -> None:
        """``hang_s``: a step that takes longer makes /health fail. ``sources``: whom a request may name as
        the source of its KV; None: nobody is asked. ``salts``: whose cache salts count; None: nobody's.
        """
        self._model = model
        self._name = name
        self._thread = thread
        self._prompts = prompts
        self._metrics = metrics
        self._sources = sources
        self._salts = salts or SaltRule()
        self._hang_s = hang_s
        self._created = int(time.time())
        self.draining = False
        """On its way out: /health says so, so that routers send nothing new."""

    def add_to(self, app: web.Application) -> None:
        """Register all routes."""
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/embeddings", self.embeddings)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model}", self.one_model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)

    # Generation

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrival = time.monotonic()
        body = await self._body(request)
        answer_id = f"chatcmpl-{_request_id(request)}"
        source = self._source(request)

        def read() -> Job:
            settings = chat_settings(body, self._model.end_ids, self._model.shape.vocab, self._salts)
            prompts = [self._prompts.chat(body)]
            return self._job(prompts, settings, source)

        job = await _off_loop_if_long(body, read)
        form = ChatAnswer(answer_id, self._name, self._model.tokenizer, job.settings.sampling.logprobs)
        return await answer(request, job, form, self._thread, self._metrics, arrival)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrival = time.monotonic()
        body = await self._body(request)
        answer_id = f"cmpl-{_request_id(request)}"
        source = self._source(request)

        def read() -> Job:
            settings = completion_settings(body, self._model.end_ids, self._model.shape.vocab, self._salts)
            return self._job(self._prompts.completion(body), settings, source)

        job = await _off_loop_if_long(body, read)
        echoes: list[str] = []
        if body.boolean("echo", False):
            for prompt in job.prompts:
                text = self._model.tokenizer.decode(prompt.tokens) if prompt.text is None else prompt.text
                echoes += [text] * job.settings.choices
        form = CompletionAnswer(
            answer_id, self._name, self._model.tokenizer, job.settings.sampling.logprobs, echoes
        )
        return await answer(request, job, form, self._thread, self._metrics, arrival)

    def _source(self, request: web.Request) -> PeerOffer | None:
        return None if self._sources is None else self._sources.offer(request.headers.get(KV_SOURCE_HEADER))

    def _job(self, prompts: Sequence[Prompt], settings: Settings, source: PeerOffer | None) -> Job:
        # The engine's ids are our own: a client may use one x-request-id twice.
        requests = sequences_of(prompts, settings, uuid.uuid4().hex, self._prompts.max_model_len, source)
        return Job(tuple(prompts), settings, tuple(requests))

    # The rest

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings: not offered."""
        raise ClientError(
            "this replica serves a text generation model and offers no embeddings; "
            "use /v1/chat/completions or /v1/completions, or send embeddings to another server",
            status=404,
        )

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        return json_answer({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}."""
        self._check_model(request.match_info["model"])
        return json_answer(self._model_card())

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health: 200 while the engine lives and moves, 503 with the reason otherwise."""
        why = self._thread.failure
        if why is None and self._thread.turn_s > self._hang_s:
            why = f"the engine has been in one step for {self._thread.turn_s:.1f} s (hang_s {self._hang_s:g})"
        if why is None and self.draining:
            why = "the replica is shutting down"
        if why is not None:
            return json_answer(error_body(why, "ServiceUnavailableError", 503), 503)
        return json_answer({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics."""
        return web.Response(
            body=await self._metrics.page(),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /tokenize: a prompt, or messages."""
        body = await self._body(request)
        if body.given("messages") is not None:
            tokens = await _off_loop_if_long(body, lambda: self._prompts.chat(body).tokens)
        else:
            prompt = body.text("prompt")
            if prompt is None:
                raise ClientError("prompt is missing; give a string, or messages", param="prompt")
            special = body.boolean("add_special_tokens", True)
            encode = self._model.tokenizer.encode
            tokens = await _off_loop_if_long(body, lambda: tuple(encode(prompt, add_special_tokens=special)))
        texts = None
        if body.boolean("return_token_strs", False):
            texts = [self._model.tokenizer.token_text(token) for token in tokens]
        return json_answer(
            {
                "count": len(tokens),
                "max_model_len": self._prompts.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """POST /detokenize: token ids back to text, special tokens included."""
        body = await self._body(request)
        if body.given("tokens") is None:
            raise ClientError("tokens is missing; give a list of token ids", param="tokens")
        tokens = body.integers("tokens")
        for token in tokens:
            if not 0 <= token < self._model.shape.vocab:
                raise ClientError(f"tokens: {token} is not a token id", param="tokens")
        return json_answer({"prompt": self._model.tokenizer.decode(tokens, skip_special_tokens=False)})

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """POST /reset_prefix_cache: forget all cached prefixes; does nothing while requests run."""
        return json_answer({"success": await self._thread.reset_prefix_cache()})

    # Inside

    async def _body(self, request: web.Request) -> Fields:
        encoding = request.headers.get(hdrs.CONTENT_ENCODING)
        raw = decoded(await request.read(), encoding, request.client_max_size)
        try:
            values = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ClientError(f"the request body is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ClientError(f"the request body must be a JSON object, got {type(values).__name__}")
        body = Fields(values, size_bytes=len(raw))
        name = body.text("model")
        if name is not None:
            self._check_model(name)
        return body

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ClientError(
                f"The model `{name}` does not exist. This replica serves `{self._name}`.",
                param="model",
                status=404,
            )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "warmroute",
            "root": self._model.name,
            "parent": None,
            "max_model_len": self._prompts.max_model_len,
        }


async def _off_loop_if_long(body: Fields, read: Callable[[], Result]) -> Result:
    """Run ``read`` here, or in a thread when the body is long enough to hold up other requests."""
    if body.size_bytes < LONG_BODY:
        return read()
    return await asyncio.to_thread(read)


def _request_id(request: web.Request) -> str:
    """The client's; bytes of it that are no text, which JSON could not give back, are left out."""
    given = request.headers.get("x-request-id", "").encode(errors="ignore").decode()
    return given or uuid.uuid4().hex
