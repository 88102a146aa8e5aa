"""How a reply ends over HTTP: the model's end token, ignored or not, before ``min_tokens`` or after it."""

import asyncio
from typing import Any

import pytest

from tests.replica.models import tiny
from tests.replica.serving import forcing_engine, post, replica, stream

END = 258
assert END in tiny().end_ids
SHOWN = tiny().tokenizer.token_text(END)
SAID = [*b"abc", END, *b"de"]
"""Over and over; the end token is the fourth of six."""


@pytest.mark.parametrize(
    ("asked", "text", "tokens", "reason", "stop"),
    [
        ({}, "abc", 4, "stop", None),
        ({"min_tokens": 3}, "abc", 4, "stop", None),
        ({"min_tokens": 4}, "abc\0deabc", 10, "stop", None),
        ({"ignore_eos": True}, "abcdeabcde", 12, "length", None),
        (
            {"ignore_eos": True, "skip_special_tokens": False},
            "abc<|im_end|>deabc<|im_end|>de",
            12,
            "length",
            None,
        ),
        ({"ignore_eos": True, "stop_token_ids": [ord("d")]}, "abc", 5, "stop", ord("d")),
        ({"ignore_eos": True, "stop_token_ids": [ord("b")], "min_tokens": 3}, "a\0cdea", 8, "stop", ord("b")),
        ({"ignore_eos": True, "stop": "ea"}, "abcd", 7, "stop", "ea"),
        ({"ignore_eos": True, "stop": "ea", "include_stop_str_in_output": True}, "abcdea", 7, "stop", "ea"),
        ({"ignore_eos": True, "stop": "bc", "min_tokens": 4}, "abcdea", 9, "stop", "bc"),
        ({"max_tokens": 2}, "ab", 2, "length", None),
    ],
    ids=str,
)
def test_a_reply_ends_where_the_request_says(
    asked: dict[str, Any], text: str, tokens: int, reason: str, stop: str | int | None
) -> None:
    async def run() -> None:
        async with replica(forcing_engine(SAID)) as running:
            url = running.url + "/v1/completions"
            body = {"prompt": "Hi", "max_tokens": 12, "temperature": 0} | asked
            _, answer = await post(url, body)
            (choice,) = answer["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop)
            assert answer["usage"]["completion_tokens"] == tokens
            events = await stream(url, body | {"stream_options": {"include_usage": True}})
            assert "".join(event["choices"][0]["text"] for event in events[:-2]) == text
            last = events[-3]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == (reason, stop)
            assert events[-2]["usage"]["completion_tokens"] == tokens

    asyncio.run(run())
