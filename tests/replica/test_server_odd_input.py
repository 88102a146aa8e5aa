"""Odd input that is nobody's fault: it is served, and holds up nobody else."""

import asyncio
import gzip
import json
import threading
from typing import Any

import aiohttp
import pytest

from replica.model.chat_template import ChatTemplate
from replica.model.tiny import tiny_tokenizer
from replica.server.fields import Fields
from replica.server.prompts import Prompt, PromptReader
from tests.replica.serving import USER, post, replica, stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_a_request_id_that_is_no_text_is_given_back_without_what_json_cannot_hold() -> None:
    async def run() -> None:
        async with replica() as running:
            for streaming in (False, True):
                body = json.dumps({"prompt": "Hi", "max_tokens": 2, "stream": streaming}).encode()
                reader, writer = await asyncio.open_connection(running.host, running.port)
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                writer.write(head.encode() + b"x-request-id: a\xffb\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
                answer = await reader.read()
                writer.close()
                assert b" 200 OK" in answer and b'"id":"cmpl-ab"' in answer

    asyncio.run(run())


@pytest.mark.parametrize("prompt", ["x " * 20, "x " * 40_000], ids=["short", "long"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_long_body_is_read_off_the_event_loop_however_short_it_came(
    prompt: str, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []
    completion = PromptReader.completion

    def watched(reader: PromptReader, body: Fields) -> list[Prompt]:
        readers.append(threading.current_thread())
        return completion(reader, body)

    monkeypatch.setattr(PromptReader, "completion", watched)

    async def run() -> None:
        async with replica() as running, aiohttp.ClientSession() as session:
            data = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
            headers = {"content-encoding": "gzip"} if compressed else {}
            sent = gzip.compress(data) if compressed else data
            async with session.post(running.url + COMPLETIONS, data=sent, headers=headers) as answer:
                assert answer.status == (200 if len(prompt) < 100 else 400)

    asyncio.run(run())
    assert [reader is threading.main_thread() for reader in readers] == [len(prompt) < 100]


def test_a_completion_that_names_no_max_tokens_takes_what_fits_of_sixteen() -> None:
    async def run() -> None:
        async with replica(max_model_len=64) as running:
            url = running.url + COMPLETIONS
            for prompt, tokens in ((40, 16), (60, 4), (63, 1)):
                asked = {"prompt": [7] * prompt, "ignore_eos": True}
                status, answer = await post(url, asked)
                assert status == 200 and answer["usage"]["completion_tokens"] == tokens
                assert answer["choices"][0]["finish_reason"] == "length"
            assert (await post(url, {"prompt": [7] * 60, "max_tokens": 16}))[0] == 400, "asked for"

    asyncio.run(run())


def test_the_largest_and_smallest_seeds_draw_for_every_choice() -> None:
    async def run() -> None:
        async with replica() as running:
            body: dict[str, Any] = {"messages": USER, "n": 3, "temperature": 2.0, "max_tokens": 8}
            for seed in (2**63 - 1, -(2**63), 0):
                texts = []
                for _ in range(2):
                    status, answer = await post(running.url + CHAT, body | {"seed": seed})
                    assert status == 200
                    texts.append([choice["message"]["content"] for choice in answer["choices"]])
                assert texts[0] == texts[1] and len(set(texts[0])) == 3
            events = await stream(running.url + CHAT, body | {"seed": 0})
            told = ["", "", ""]
            for event in events[:-1]:
                (choice,) = event["choices"]
                told[choice["index"]] += choice["delta"].get("content", "")
            assert told == texts[0]

    asyncio.run(run())


def _tools_template() -> ChatTemplate:
    return ChatTemplate(
        "{% if tools %}Tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments }}){% endfor %}"
        "{{ '\\n' }}{% endfor %}",
        {},
    )


def test_tool_definitions_calls_and_results_are_in_the_prompt_where_the_template_has_a_place() -> None:
    reader = PromptReader(tiny_tokenizer(), _tools_template(), vocab=264, max_model_len=2_000)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Oslo"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "snow"}]},
    ]
    asked = {"messages": messages, "tools": [tool]}
    talk = 'user: Hello there\nassistant: weather({"in": "Oslo"})\ntool: snow\n'
    for choice, text in ((None, f"Tools: {json.dumps([tool])}\n{talk}"), ("none", talk)):
        prompt = reader.chat(Fields(asked | {"tool_choice": choice}))
        assert prompt.text == text and bytes(prompt.tokens).decode() == text
