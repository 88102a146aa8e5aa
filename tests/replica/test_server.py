"""The replica over real sockets: OpenAI's routes, streamed and not, usage, logprobs, metrics, the SDK."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from replica.model.tiny import tiny_tokenizer
from tests.replica.models import finish_all, greedy_request, make_engine, text_of
from tests.replica.serving import USER, gauge, get, post, replica, stream, until

CHAT = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 12}
COMPLETION = {"model": "tiny", "prompt": "Hello there", "temperature": 0, "max_tokens": 12}


def _expected(prompt: str, max_tokens: int) -> str:
    tokens = tiny_tokenizer().encode(prompt, add_special_tokens=False)
    return text_of(finish_all(make_engine(), [greedy_request("a", tokens, max_tokens)])["a"])


def test_chat_streams_what_it_answers_whole() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/chat/completions"
            status, whole = await post(url, CHAT | {"ignore_eos": True})
            assert status == 200 and whole["object"] == "chat.completion" and whole["model"] == "tiny"
            (choice,) = whole["choices"]
            prompt = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
            assert choice["message"] == {"role": "assistant", "content": _expected(prompt, 12)}
            assert choice["finish_reason"] == "length"
            tokens = len(tiny_tokenizer().encode(prompt, add_special_tokens=False))
            assert whole["usage"] == {
                "prompt_tokens": tokens,
                "completion_tokens": 12,
                "total_tokens": tokens + 12,
                "prompt_tokens_details": {"cached_tokens": 0},
            }
            events = await stream(url, CHAT | {"ignore_eos": True, "stream_options": {"include_usage": True}})
            assert events[-1] == "[DONE]"
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events[-2]["choices"] == []
            assert events[-2]["usage"] == whole["usage"] | {
                "prompt_tokens_details": {"cached_tokens": tokens // 16 * 16}
            }
            chunks = events[:-2]
            assert {event["object"] for event in chunks} == {"chat.completion.chunk"}
            assert len({event["id"] for event in events[:-1]}) == 1
            texts = [event["choices"][0]["delta"].get("content", "") for event in chunks]
            assert "".join(texts) == choice["message"]["content"]
            assert sum(bool(text) for text in texts) > 3
            reasons = [event["choices"][0]["finish_reason"] for event in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["length"]

    asyncio.run(run())


def test_completions_take_text_token_ids_and_lists_of_them() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/completions"
            texts = ["Hello there", "Other prompt"]
            ids = [list(text.encode()) for text in texts]
            singles = []
            for text in texts:
                status, answer = await post(url, COMPLETION | {"prompt": text})
                assert status == 200 and answer["object"] == "text_completion"
                singles.append(answer["choices"][0]["text"])
            assert singles[0] == _expected(texts[0], 12)
            for prompt, expected in (
                (ids[0], singles[:1]),
                (texts, singles),
                (ids, singles),
                ([texts[0]], singles[:1]),
            ):
                status, answer = await post(url, COMPLETION | {"prompt": prompt})
                assert status == 200, answer
                assert [choice["text"] for choice in answer["choices"]] == expected
                assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
            events = await stream(url, COMPLETION | {"prompt": texts})
            streamed = ["", ""]
            for event in events[:-1]:
                streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert streamed == singles
            status, echoed = await post(url, COMPLETION | {"echo": True})
            assert echoed["choices"][0]["text"] == texts[0] + singles[0]
            events = await stream(url, COMPLETION | {"echo": True, "prompt": ids[0]})
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == texts[0] + singles[0]

    asyncio.run(run())


def test_n_choices_differ_and_seeds_repeat() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/chat/completions"
            body = {"messages": USER, "n": 3, "seed": 11, "temperature": 1.5, "max_tokens": 10}
            _, first = await post(url, body)
            _, second = await post(url, body)
            texts = [choice["message"]["content"] for choice in first["choices"]]
            assert texts == [choice["message"]["content"] for choice in second["choices"]]
            assert len(set(texts)) == 3
            one_prompt = first["usage"]["prompt_tokens"]
            _, single = await post(url, body | {"n": 1})
            assert single["usage"]["prompt_tokens"] == one_prompt
            assert single["choices"][0]["message"]["content"] == texts[0]

    asyncio.run(run())


def test_cached_tokens_are_told_and_reset_forgets_them() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/completions"
            prompt = "The same long prefix of more than sixty-four bytes, so four blocks of it. "

            async def cached(suffix: str) -> int:
                _, answer = await post(url, COMPLETION | {"prompt": prompt + suffix})
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert [await cached("one"), await cached("two")] == [0, 64]
            assert await post(running.url + "/reset_prefix_cache", b"") == (200, {"success": True})
            assert await cached("one") == 0
            queries = await gauge(running.url, "vllm:prefix_cache_queries_total")
            assert queries == 3 * (len(prompt) + 3)
            assert await gauge(running.url, "vllm:prefix_cache_hits_total") == 64
        async with replica(prefix_caching=False) as running:
            url = running.url + "/v1/completions"
            assert [await cached("one"), await cached("two")] == [0, 0]

    asyncio.run(run())


def test_logprobs_in_both_forms() -> None:
    async def run() -> None:
        async with replica(batch_invariant=True) as running:
            url = running.url + "/v1/chat/completions"
            _, answer = await post(url, CHAT | {"logprobs": True, "top_logprobs": 3})
            (choice,) = answer["choices"]
            content = choice["logprobs"]["content"]
            assert (
                bytes(byte for one in content for byte in one["bytes"]).decode(errors="replace")
                == (choice["message"]["content"])
            )
            for one in content:
                assert one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0  # greedy
                assert len(one["top_logprobs"]) == 3
            events = await stream(url, CHAT | {"logprobs": True, "top_logprobs": 3})
            streamed: list[Any] = []
            for event in events[:-1]:
                streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
            assert streamed == content
            url = running.url + "/v1/completions"
            _, answer = await post(url, COMPLETION | {"logprobs": 2})
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"]
            assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 12
            assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
            assert all(len(top) == 2 for top in logprobs["top_logprobs"])
            _, answer = await post(url, COMPLETION | {"logprobs": 0})
            assert answer["choices"][0]["logprobs"]["top_logprobs"] is None

    asyncio.run(run())


def test_stop_strings_end_a_stream_as_they_end_an_answer() -> None:
    async def run() -> None:
        async with replica() as running:
            url = running.url + "/v1/completions"
            _, free = await post(url, COMPLETION | {"max_tokens": 30, "ignore_eos": True})
            whole = free["choices"][0]["text"]
            body = COMPLETION | {"max_tokens": 30, "stop": [whole[10:13], "never"], "ignore_eos": True}
            _, answer = await post(url, body)
            (choice,) = answer["choices"]
            assert choice["text"] == whole[: whole.find(whole[10:13])]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", whole[10:13])
            events = await stream(url, body)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]
            assert events[-2]["choices"][0]["finish_reason"] == "stop"

    asyncio.run(run())


def test_the_openai_sdk_talks_to_it() -> None:
    async def run() -> None:
        async with (
            replica(served_model_name="my-model") as running,
            openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
        ):
            models = await client.models.list()
            assert [model.id for model in models.data] == ["my-model"]
            whole = await client.chat.completions.create(
                model="my-model",
                messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
                max_completion_tokens=8,
                temperature=0,
            )
            assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 0
            text = ""
            used = None
            async for chunk in await client.chat.completions.create(
                model="my-model",
                messages=[{"role": "user", "content": "Hello"}],
                max_completion_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            ):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                used = chunk.usage or used
            assert text == whole.choices[0].message.content
            assert used is not None and used.completion_tokens == whole.usage.completion_tokens
            completion = await client.completions.create(model="my-model", prompt=[72, 105], max_tokens=3)
            assert completion.choices[0].finish_reason in ("length", "stop")
            with pytest.raises(openai.NotFoundError, match="`gpt-4` does not exist"):
                await client.chat.completions.create(
                    model="gpt-4", messages=[{"role": "user", "content": "Hello"}]
                )
            with pytest.raises(openai.BadRequestError, match="messages is empty"):
                await client.chat.completions.create(model="my-model", messages=[])
            with pytest.raises(openai.NotFoundError, match="no embeddings"):
                await client.embeddings.create(model="my-model", input="x")

    asyncio.run(run())


def test_models_tokenize_detokenize_and_health() -> None:
    async def run() -> None:
        async with replica(max_model_len=512) as running:
            status, models = await get(running.url + "/v1/models")
            (card,) = json.loads(models)["data"]
            assert (status, card["id"], card["max_model_len"]) == (200, "tiny", 512)
            assert (await get(running.url + "/v1/models/tiny"))[0] == 200
            assert (await get(running.url + "/v1/models/other"))[0] == 404
            assert (await get(running.url + "/health"))[0] == 200
            _, tokens = await post(
                running.url + "/tokenize", {"prompt": "h\u00e9", "return_token_strs": True}
            )
            assert tokens == {
                "count": 3,
                "max_model_len": 512,
                "tokens": [104, 195, 169],
                "token_strs": ["h", "\ufffd", "\ufffd"],
            }
            _, chat = await post(running.url + "/tokenize", {"messages": USER})
            _, answer = await post(running.url + "/v1/chat/completions", {"messages": USER, "max_tokens": 1})
            assert chat["count"] == answer["usage"]["prompt_tokens"]
            _, text = await post(running.url + "/detokenize", {"tokens": chat["tokens"]})
            assert text == {"prompt": "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"}

    asyncio.run(run())


def test_metrics_have_vllms_names_and_count() -> None:
    async def run() -> None:
        async with replica() as running:
            await post(running.url + "/v1/completions", COMPLETION | {"ignore_eos": True})
            _, page = await get(running.url + "/metrics")
            labels = '{engine="0",model_name="tiny"}'
            for line in (
                f"vllm:num_requests_running{labels} 0.0",
                f"vllm:num_requests_waiting{labels} 0.0",
                f"vllm:kv_cache_usage_perc{labels} 0.0",
                f"vllm:prefix_cache_queries_total{labels} 11.0",
                f"vllm:prefix_cache_hits_total{labels} 0.0",
                f"vllm:prompt_tokens_total{labels} 11.0",
                f"vllm:generation_tokens_total{labels} 12.0",
                f"vllm:time_to_first_token_seconds_count{labels} 1.0",
                "# TYPE vllm:prefix_cache_hits_total counter",
                "# TYPE vllm:num_requests_running gauge",
                "# TYPE vllm:time_to_first_token_seconds histogram",
            ):
                assert line in page, f"{line}\n---\n{page}"
            assert 'num_gpu_blocks="256"' in page and 'block_size="16"' in page
            finished = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0'
            assert finished in page

    asyncio.run(run())


def test_a_request_id_is_given_back() -> None:
    async def run() -> None:
        async with replica() as running, aiohttp.ClientSession() as session:
            for body in (COMPLETION, COMPLETION | {"stream": True}):
                async with session.post(
                    running.url + "/v1/completions", json=body, headers={"x-request-id": "abc-1"}
                ) as answer:
                    assert answer.status == 200 and answer.headers["x-request-id"] == "abc-1"
                    assert "cmpl-abc-1" in await answer.text()

    asyncio.run(run())


def test_many_requests_at_once_get_their_own_answers() -> None:
    async def run() -> None:
        async with replica(max_running=8, max_batched_tokens=64, kv_tokens=1024) as running:
            url = running.url + "/v1/completions"
            prompts = [f"Shared beginning of all prompts, then number {i * 7919}" for i in range(40)]
            answers = await asyncio.gather(*(post(url, COMPLETION | {"prompt": p}) for p in prompts))
            again = [await post(url, COMPLETION | {"prompt": p}) for p in prompts]
            texts = [answer["choices"][0]["text"] for _, answer in answers]
            assert texts == [answer["choices"][0]["text"] for _, answer in again]
            assert len(set(texts)) > 20

            async def idle() -> bool:
                return await gauge(running.url, "vllm:kv_cache_usage_perc") == 0.0

            await until(idle)

    asyncio.run(run())
