"""Bad input gets OpenAI's error shape and a sentence that helps, never a 500, and the replica goes on."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.replica.serving import USER, post, replica

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2} | fields


def _plain(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 2} | fields


def _content(content: Any, role: str = "user") -> dict[str, Any]:
    return _chat(messages=[{"role": role, "content": content}])


BAD: tuple[tuple[str, Any, int, str, str | None], ...] = (
    # path, body, status, part of the message, param
    (CHAT, b"", 400, "not valid JSON", None),
    (CHAT, b"{", 400, "not valid JSON", None),
    (CHAT, b"\xff\xfe", 400, "not valid JSON", None),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not valid JSON", None),
    (COMPLETIONS, b'{"prompt": "\\udc00 lone"}', 400, "surrogate", None),
    (CHAT, b"[" * 5000, 400, "not valid JSON", None),
    (CHAT, [], 400, "must be a JSON object, got list", None),
    (CHAT, "text", 400, "must be a JSON object", None),
    (CHAT, _chat(model="nope"), 404, "The model `nope` does not exist. This replica serves `tiny`", "model"),
    (CHAT, _chat(model=7), 400, "model: expected a string", "model"),
    (CHAT, {"model": "tiny"}, 400, "messages is missing", "messages"),
    (CHAT, _chat(messages=[]), 400, "messages is empty; provide at least one", "messages"),
    (CHAT, _chat(messages="hi"), 400, "messages: expected a list", "messages"),
    (CHAT, _chat(messages=["hi"]), 400, "expected an object with role and content", "messages[0]"),
    (CHAT, _chat(messages=[{"content": "x"}]), 400, "expected one of system, user", "messages[0].role"),
    (CHAT, _chat(messages=[{"role": 5, "content": "x"}]), 400, "expected one of", "messages[0].role"),
    (CHAT, _chat(messages=[{"role": "user"}]), 400, "missing or null", "messages[0].content"),
    (CHAT, _content(None), 400, "missing or null; give a string", "messages[0].content"),
    (CHAT, _content(5), 400, "expected a string or a list of text parts", "messages[0].content"),
    (CHAT, _content([IMAGE]), 400, "'image_url' is not supported; this model reads text", None),
    (CHAT, _content([{"type": "text"}]), 400, "expected a string", "messages[0].content[0].text"),
    (CHAT, _content([5]), 400, "not supported", "messages[0].content[0]"),
    (CHAT, _content("x" * 5000), 400, "maximum context length is 200 tokens", "messages"),
    (CHAT, _chat(tools=[{"type": "function"}]), 400, "no place for tool definitions", "tools"),
    (CHAT, _chat(tools="x"), 400, "tools: expected a list of tool definitions", "tools"),
    (CHAT, _chat(tools=[{}], tool_choice="required"), 400, "tool_choice: expected", "tool_choice"),
    (CHAT, _chat(prompt_logprobs=1), 400, "prompt_logprobs is not supported", "prompt_logprobs"),
    (COMPLETIONS, _plain(prompt_logprobs=0), 400, "for generated tokens only", "prompt_logprobs"),
    (COMPLETIONS, _plain(echo=True, logprobs=1), 400, "echo with logprobs", "logprobs"),
    (CHAT, _chat(guided_json={"type": "object"}), 400, "guided_json is not supported", "guided_json"),
    (CHAT, _chat(chat_template_kwargs={"a": 1}), 400, "no values but messages", "chat_template_kwargs"),
    (CHAT, _chat(max_tokens=-1), 400, "max_tokens: expected a whole number, 1 or more, got -1", "max_tokens"),
    (CHAT, _chat(max_tokens=0), 400, "max_tokens: expected", "max_tokens"),
    (CHAT, _chat(max_tokens="5"), 400, "max_tokens: expected a whole number", "max_tokens"),
    (CHAT, _chat(max_tokens=1.5), 400, "max_tokens: expected a whole number", "max_tokens"),
    (CHAT, _chat(max_tokens=True), 400, "max_tokens: expected a whole number", "max_tokens"),
    (CHAT, _chat(max_tokens=10**30), 400, "maximum context length is 200 tokens", "max_tokens"),
    (CHAT, _chat(max_tokens=190), 400, "you requested", "max_tokens"),
    (CHAT, _chat(max_completion_tokens=0), 400, "max_completion_tokens: expected", "max_completion_tokens"),
    (CHAT, _chat(min_tokens=9), 400, "min_tokens 9 is more than max_tokens 2", "min_tokens"),
    (CHAT, _chat(n=0), 400, "n: expected a whole number from 1 to 64, got 0", "n"),
    (CHAT, _chat(n=1000), 400, "n: expected", "n"),
    (CHAT, _chat(temperature=-1), 400, "temperature: expected a number from 0.0", "temperature"),
    (CHAT, _chat(temperature="hot"), 400, "temperature: expected a number", "temperature"),
    (CHAT, _chat(top_p=1.5), 400, "top_p: expected a number from 0.0 to 1.0", "top_p"),
    (CHAT, _chat(top_k="x"), 400, "top_k: expected a whole number", "top_k"),
    (CHAT, _chat(seed=2**70), 400, "seed: expected", "seed"),
    (CHAT, _chat(presence_penalty=3), 400, "presence_penalty: expected", "presence_penalty"),
    (CHAT, _chat(stop=5), 400, "stop: expected a non-empty string or a list", "stop"),
    (CHAT, _chat(stop=[""]), 400, "stop: expected a non-empty string", "stop"),
    (CHAT, _chat(stop=["a"] * 17), 400, "at most 16", "stop"),
    (CHAT, _chat(stop_token_ids=[-1]), 400, "stop_token_ids: -1 is not a token id", "stop_token_ids"),
    (CHAT, _chat(stop_token_ids="x"), 400, "list of whole numbers", "stop_token_ids"),
    (CHAT, _chat(stream="yes"), 400, "stream: expected true or false", "stream"),
    (CHAT, _chat(stream_options={"include_usage": True}), 400, "needs stream: true", "stream_options"),
    (CHAT, _chat(stream=True, stream_options=5), 400, "expected a JSON object", "stream_options"),
    (CHAT, _chat(logprobs=5), 400, "logprobs: expected true or false", "logprobs"),
    (CHAT, _chat(top_logprobs=5), 400, "top_logprobs needs logprobs", "top_logprobs"),
    (CHAT, _chat(logprobs=True, top_logprobs=21), 400, "from 0 to 20", "top_logprobs"),
    (CHAT, _chat(logit_bias={"x": 1}), 400, "not a token id", "logit_bias.x"),
    (CHAT, _chat(logit_bias={"9" * 5000: 1}), 400, "'9999", None),
    (CHAT, _chat(logit_bias={"\u0663": 1}), 400, "not a token id", "logit_bias.\u0663"),
    (CHAT, _chat(logit_bias={"5": 1000}), 400, "from -100.0 to 100.0", "logit_bias.5"),
    (CHAT, _chat(response_format={"type": "json_object"}), 400, "only 'text'", "response_format"),
    (CHAT, _chat(cache_salt=""), 400, "cache_salt: expected 1 to 128 characters", "cache_salt"),
    (CHAT, _chat(cache_salt=5), 400, "cache_salt: expected a string", "cache_salt"),
    (CHAT, _chat(cache_salt="x" * 129), 400, "cache_salt: expected 1 to 128 characters", "cache_salt"),
    (CHAT, _chat(cache_salt="mine"), 400, "this replica takes none", "cache_salt"),
    (COMPLETIONS, _plain(cache_salt="mine"), 400, "this replica takes none", "cache_salt"),
    (COMPLETIONS, {"model": "tiny"}, 400, "prompt is missing", "prompt"),
    (COMPLETIONS, _plain(prompt=""), 400, "the prompt is empty", "prompt"),
    (COMPLETIONS, _plain(prompt=[]), 400, "prompt: expected a string", "prompt"),
    (COMPLETIONS, _plain(prompt=[[]]), 400, "the prompt is empty", "prompt"),
    (COMPLETIONS, _plain(prompt=5), 400, "prompt: expected a string", "prompt"),
    (COMPLETIONS, _plain(prompt=["a", 1]), 400, "prompt: expected a string", "prompt"),
    (COMPLETIONS, _plain(prompt=[True]), 400, "prompt: expected a string", "prompt"),
    (COMPLETIONS, _plain(prompt=[264]), 400, "token id 264 is not in the vocabulary of 264", "prompt"),
    (COMPLETIONS, _plain(prompt=[-1]), 400, "token id -1 is not in the vocabulary", "prompt"),
    (COMPLETIONS, _plain(prompt=[10**40]), 400, "prompt: expected a string", "prompt"),
    (COMPLETIONS, _plain(prompt=[1] * 200), 400, "your prompt has 200 tokens", "prompt"),
    (COMPLETIONS, _plain(prompt="x" * 200), 400, "your prompt has 200 tokens", "prompt"),
    (COMPLETIONS, _plain(prompt=["x"] * 300), 400, "at most 256", "prompt"),
    (COMPLETIONS, _plain(logprobs=21), 400, "logprobs: expected a whole number from 0 to 20", "logprobs"),
    (COMPLETIONS, _plain(logprobs=1, echo=True), 400, "echo with logprobs", "logprobs"),
    (COMPLETIONS, _plain(max_tokens=None, min_tokens=17), 400, "more than max_tokens 16", "min_tokens"),
    (COMPLETIONS, _plain(suffix="x"), 400, "suffix is not supported", "suffix"),
    (COMPLETIONS, _plain(best_of=3), 400, "best_of", "best_of"),
    ("/tokenize", {}, 400, "prompt is missing", "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt: expected a string", "prompt"),
    ("/detokenize", {}, 400, "tokens is missing", "tokens"),
    ("/detokenize", {"tokens": [999]}, 400, "999 is not a token id", "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "list of whole numbers", "tokens"),
    ("/v1/embeddings", {"model": "tiny", "input": "x"}, 404, "offers no embeddings", None),
    ("/v1/responses", {"model": "tiny", "input": "x"}, 404, "Not Found", None),
    ("/health", {}, 405, "Method Not Allowed", None),
)


def test_bad_input_is_refused_with_a_sentence_and_the_replica_goes_on() -> None:
    async def run() -> None:
        async with replica(max_model_len=200) as running:
            wrong = []
            for path, body, status, message, param in BAD:
                got, answer = await post(running.url + path, body)
                error = answer.get("error", {})
                fits = (
                    got == status
                    and message in error.get("message", "")
                    and error.get("code") == status
                    and set(error) == {"message", "type", "param", "code"}
                    and (param is None or error["param"] == param)
                )
                if not fits:
                    wrong.append((path, str(body)[:80], got, answer))
            assert not wrong, "\n".join(map(str, wrong))
            assert (await post(running.url + CHAT, _chat()))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        _content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        _chat(messages=[*USER, {"role": "assistant", "content": None}, *USER]),
        _chat(messages=[{"role": "developer", "content": "x"}, *USER]),
        _chat(messages=[*USER, {"role": "tool", "tool_call_id": "1", "content": "4"}]),
        _chat(tools=[], tool_choice="none"),
        _chat(tools=[{"type": "function"}], tool_choice="none"),
        _chat(unknown_field=1, user="x", metadata={"a": 1}, temperature=None, stop=None, n=None),
        _chat(max_tokens=3.0, top_k=-1, stop=[]),
        _chat(response_format={"type": "text"}),
        _content("nul \x00 and \U0001f600"),
        {"messages": USER, "max_tokens": 1},
    ],
    ids=str,
)
def test_unusual_but_valid_input_is_served(body: dict[str, Any]) -> None:
    async def run() -> None:
        async with replica(max_model_len=400) as running:
            status, answer = await post(running.url + CHAT, body)
            assert status == 200, answer

    asyncio.run(run())


def test_a_body_that_is_too_large_is_413() -> None:
    async def run() -> None:
        async with replica(max_body_mib=1) as running:
            body = _plain(prompt="x" * (2**20 + 1))
            status, answer = await post(running.url + COMPLETIONS, body)
            assert status == 413 and "larger than 1 MiB" in answer["error"]["message"]
            assert (await post(running.url + COMPLETIONS, _plain()))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        *((name, b"junk", 400) for name in ("gzip", "deflate")),
        ("gzip", gzip.compress(b"x" * 100, mtime=0)[:-9], 400),
        ("zstd", b"junk", 415),
        ("br", b"junk", 415),
        ("gzip", gzip.compress(b" " * (2**20 + 1), mtime=0), 413),
    ],
)
def test_a_wrong_content_encoding_is_the_clients_fault(encoding: str, data: bytes, status: int) -> None:
    async def run() -> None:
        async with replica(max_body_mib=1) as running, aiohttp.ClientSession() as session:
            headers = {"content-encoding": encoding}
            async with session.post(running.url + COMPLETIONS, data=data, headers=headers) as answer:
                assert answer.status == status and answer.content_type == "application/json"
                error = (await answer.json())["error"]
                assert error["code"] == status and ("Content-Encoding" in error["message"] or status == 413)
            assert (await post(running.url + COMPLETIONS, _plain()))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_a_compressed_body_is_read(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    async def run() -> None:
        async with replica() as running, aiohttp.ClientSession() as session:
            body, headers = encode(json.dumps(_plain()).encode()), {"content-encoding": encoding}
            async with session.post(running.url + COMPLETIONS, data=body, headers=headers) as answer:
                assert answer.status == 200

    asyncio.run(run())


def test_a_huge_prompt_is_refused_without_being_tokenized() -> None:
    async def run() -> None:
        async with replica(max_model_len=200) as running:
            status, answer = await post(running.url + COMPLETIONS, _plain(prompt="x" * 20_000_000))
            assert status == 400
            assert "your prompt has at least" in answer["error"]["message"]

    asyncio.run(run())


def test_no_content_type_is_needed() -> None:
    async def run() -> None:
        async with (
            replica() as running,
            aiohttp.ClientSession() as session,
            session.post(
                running.url + COMPLETIONS,
                data=b'{"prompt": "Hi", "max_tokens": 1}',
                headers={"content-type": "text/plain; charset=utf-7"},
            ) as answer,
        ):
            assert answer.status == 200

    asyncio.run(run())
