"""Bodies of very many values: read without an object for each, so that no request holds the loop for long."""

import json
from typing import Any

import pytest

from router.proxy.crowded_body import (
    CHECK_FROM_BYTES,
    FLAT_MARKS,
    Parser,
    marks_of,
    parser_for,
    promises_many,
)
from router.routing.flat_request import whole_request
from router.routing.prompt_blocks import Prompt, read_prompt, text_prompt
from tests.fakes.fake_replica import completion
from tests.fakes.proxy_rig import Rig, with_rig
from tests.fakes.tenants import tenants

MANY = 9_000


def message(number: int) -> dict[str, Any]:
    return {"role": "user" if number % 2 else "assistant", "content": f"m{number}"}


def body_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def parser_of(body: bytes) -> Parser | None:
    """As the request path finds it, which does so in turns; ``None``: it refuses the body."""
    if len(body) < CHECK_FROM_BYTES or not promises_many(body):
        return whole_request
    total = marks_of(body)
    return None if total is None else parser_for(body, total)


def read(body: bytes) -> Prompt:
    """As the request path does, flat."""
    parse = parser_of(body)
    assert parse is not None and parse is not whole_request
    request = parse(body)
    assert request is not None
    return text_prompt(request)


def test_prompts_that_begin_alike_do_so_read_flat() -> None:
    conversation = [message(number) for number in range(MANY)]
    first, longer = (
        read(body_of(model="m", messages=turns, stream=True, max_tokens=9))
        for turns in (conversation, [*conversation, message(MANY), message(MANY + 1)])
    )
    assert (first.model, first.stream, first.max_tokens) == ("m", True, 9)
    assert len(first.keys) > 100 and longer.keys[: len(first.keys) - 1] == first.keys[:-1]
    other = read(body_of(model="m", messages=[message(1), *conversation]))
    assert other.keys[0] != first.keys[0]
    for more in ({"tools": [{"name": "t"}]}, {"cache_salt": "s"}):
        assert read(body_of(model="m", messages=conversation, **more)).keys[0] != first.keys[0]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n ", ": ")])
@pytest.mark.parametrize("nested", [False, True])
def test_token_ids_have_the_same_keys_either_way(separators: tuple[str, str], nested: bool) -> None:
    ids = [number * 7 % 128_000 for number in range(FLAT_MARKS + 9)]
    body = json.dumps({"model": "m", "prompt": [ids] if nested else ids}, separators=separators).encode()
    flat, whole = read(body), read_prompt(body)
    assert (flat.keys, flat.units, flat.tokens) == (whole.keys, whole.units, len(ids))


@pytest.mark.parametrize(
    "name",
    ["priority", "\\u0070riority", "kv_transfer_params", '"'],
    ids=["plain", "escaped", "object", "none"],
)
def test_fields_that_steer_the_engine_are_seen(name: str) -> None:
    messages = b",".join([b'{"role":"user","content":"x"}'] * MANY)
    body = b'{"messages":[%b],"%b":%b}' % (
        messages,
        name.replace('"', "x").encode(),
        b'{"a":[' + b"1," * 3_000 + b"1]}" if "kv" in name else b"0",
    )
    wanted = () if name == '"' else ("kv_transfer_params" if "kv" in name else "priority",)
    assert read(body).controls == wanted
    hidden = b'{"messages":[%b],"vllm_xargs":{"%b":0,"x":[%b]}}' % (
        messages,
        b"priority",
        b"1," * 50_000 + b"1",
    )
    parse = parser_of(hidden)
    assert parse is not None and parse(hidden) is None  # then its text is searched


def test_what_is_text_is_no_crowd() -> None:
    source = 'for [key, value] in {1: 2, 3: 4}, "a", []:\n' * 40
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": source}}]
    turns: list[Any] = [
        *({"role": "user", "content": source} for _ in range(200)),
        {"role": "user", "content": [{"type": "text", "text": source}, {"type": "text", "text": source}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert parser_of(body_of(model="m", messages=turns)) is whole_request
    for field in ("prompt", "input"):
        assert parser_of(body_of(**{field: source * 200})) is whole_request


def test_many_messages_reach_their_replica_as_they_came() -> None:
    async def scenario(rig: Rig) -> None:
        for body in (
            body_of(model="m", messages=[message(number) for number in range(MANY)]),
            body_of(model="m", prompt=[[]] * MANY * 4),
            b'{"unheard_of": [' + b"[]," * MANY * 4 + b"0]}",
        ):
            answer = await rig.ask(body)
            assert answer.body == completion()
            assert rig.replica.requests[-1].body == body
            client = await rig.client()
            await client.post(body)
            client.leave()  # between two turns of the loop, or not: booked is nothing at the end
        answer = await rig.ask(body_of(messages=[message(1)] * MANY, priority=0))
        assert (answer.status, answer.error["param"]) == (400, "priority")

    with_rig(scenario)


def test_a_tenants_salt_is_put_into_them() -> None:
    async def scenario(rig: Rig) -> None:
        key = {"authorization": "Bearer sk-a"}
        for body in (
            body_of(model="m", messages=[message(number) for number in range(MANY)]),
            b'{"unheard_of": [' + b"[]," * MANY * 4 + b"0]}",
        ):
            answer = await rig.ask(body, **key)
            assert answer.body == completion()
            sent = json.loads(rig.replica.requests[-1].body)
            assert sent.pop("cache_salt") and sent == json.loads(body)

    with_rig(scenario, tenants=tenants())
