"""What names a prompt: same prompts same keys, different prompts different keys, nothing raises."""

import json
import subprocess
import sys
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.prompt_blocks import (
    MAX_BLOCKS,
    TEXT_LAYOUT,
    UNREADABLE,
    block_keys,
    canonical_text,
    read_prompt,
    root_key,
    text_prompt,
)

FACTS = ("keys", "units", "model", "stream", "max_tokens", "tokens", "controls", "chains")
SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 40}


def keys_of(**body: object) -> list[int]:
    return list(read_prompt(json.dumps({"model": "m"} | body).encode()).keys)


def chat(*contents: object, **more: object) -> list[int]:
    messages = [SYSTEM, *({"role": "user", "content": content} for content in contents)]
    return keys_of(messages=messages, **more)


def shared(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@pytest.mark.parametrize(("kib", "blocks"), [(2, 8), (32, 72), (256, 161)])
def test_block_counts(kib: int, blocks: int) -> None:
    assert len(block_keys(b"a" * (kib * 1024), 1)) == blocks


def test_a_prompt_of_any_length_has_bounded_blocks() -> None:
    assert len(block_keys(b"a" * 20_000_000, 1)) <= MAX_BLOCKS


@given(st.binary(max_size=9_000), st.binary(max_size=700), st.binary(max_size=700))
def test_keys_agree_exactly_on_the_common_prefix(head: bytes, one: bytes, other: bytes) -> None:
    a, b = block_keys(head + one, 1), block_keys(head + other, 1)
    text_a, text_b = head + one, head + other
    common = 0
    while common < min(len(a), len(b)):
        stop = TEXT_LAYOUT.end(common + 1)
        if text_a[:stop] != text_b[:stop]:
            break
        common += 1
    assert shared(a, b) == common
    assert not set(a[common:]) & set(b[common:])


def test_B081_same_block_after_another_prefix_is_another_key() -> None:
    same = b"s" * 256
    assert block_keys(b"a" * 256 + same, 1)[1] != block_keys(b"b" * 256 + same, 1)[1]


def test_model_salt_and_adapter_are_in_the_root() -> None:
    roots = [
        root_key("m"),
        root_key("n"),
        root_key(None),
        root_key("m", salt="foo"),
        root_key("m", adapter="foo"),
        root_key("m", salt="fo", adapter="o"),
        root_key("m", salt="f", adapter="oo"),
        root_key("ms3:foo"),
    ]
    assert len(set(roots)) == len(roots)
    text = b"t" * 1_000
    assert not set(block_keys(text, roots[0])) & set(block_keys(text, roots[1]))


def test_a_longer_conversation_keeps_the_keys_of_its_past() -> None:
    turns = ["first question " * 30, "second question " * 30, "third " * 60]
    one, two, three = chat(*turns[:1]), chat(*turns[:2]), chat(*turns)
    assert shared(one, two) == len(one) and shared(two, three) == len(two)
    assert len(one) < len(two) < len(three)


def test_B025_string_and_one_text_part_are_alike() -> None:
    assert chat("hello " * 100) == chat([{"type": "text", "text": "hello " * 100}])


def test_B025_images_differ_by_their_data() -> None:
    def image(url: str) -> list[object]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what? " * 200}]

    one, other = chat(image("data:image/png;base64,AAAA")), chat(image("data:image/png;base64,BBBB"))
    assert one == chat(image("data:image/png;base64,AAAA"))
    assert one[-1] != other[-1]


def test_B139_tools_come_first_and_count() -> None:
    def tool(name: str) -> list[object]:
        return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]

    assert chat("q", tools=tool("a")) == chat("q", tools=tool("a"))
    assert shared(chat("q", tools=tool("a")), chat("q", tools=tool("b"))) == 0
    assert shared(chat("q", tools=tool("a")), chat("q")) == 0


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}))},
        optional={
            "model": st.one_of(st.text(), st.integers()),
            "stream": st.one_of(st.booleans(), st.just("yes")),
            "max_tokens": st.one_of(st.integers(-1, 9), st.none(), st.text(), st.booleans()),
            "input": st.text(),
            "temperature": st.floats(0, 2),
            "priority": st.just(1),
            "vllm_xargs": st.just({"kv_transfer_params": "x"}),
        },
    )
)
def test_a_plain_request_is_read_like_any_other(body: dict[str, Any]) -> None:
    """A field that is there and says nothing is looked for, and so are all the others."""
    plain, other = text_prompt(body), text_prompt(body | {"cache_salt": None})
    assert [getattr(plain, name) for name in FACTS] == [getattr(other, name) for name in FACTS]


def test_input_without_messages_is_read_as_a_plain_request() -> None:
    assert keys_of(input="a" * 600) == keys_of(input="a" * 600, cache_salt=None) != []


@pytest.mark.parametrize(
    "field", ["cache_salt", "reasoning_effort", "chat_template", "documents", "chat_template_kwargs"]
)
def test_B139_what_else_shapes_the_prompt_or_parts_the_cache_counts(field: str) -> None:
    plain, one, other = chat("q"), chat("q", **{field: "a"}), chat("q", **{field: "b"})
    assert shared(plain, one) == shared(plain, other) == shared(one, other) == 0
    assert one == chat("q", **{field: "a"})


def test_B024_token_ids_alone_or_in_a_list_of_one_are_one_prompt() -> None:
    ids = list(range(900))
    assert keys_of(prompt=ids) == keys_of(prompt=[ids]) != keys_of(prompt=[ids, ids])


def test_B139_whitespace_of_the_json_does_not_matter() -> None:
    body = {"model": "m", "messages": [SYSTEM], "tools": [{"type": "function", "function": {"name": "f"}}]}
    tight, loose = orjson.dumps(body), json.dumps(body, indent=4).encode()
    assert read_prompt(tight).keys == read_prompt(loose).keys


def test_roles_and_message_borders_count() -> None:
    filler = "x " * 200
    user = keys_of(messages=[{"role": "user", "content": filler}])
    system = keys_of(messages=[{"role": "system", "content": filler}])
    split = keys_of(
        messages=[{"role": "user", "content": filler[:200]}, {"role": "user", "content": filler[200:]}]
    )
    assert len({user[-1], system[-1], split[-1]}) == 3


def test_tool_calls_and_names_count() -> None:
    def call(arguments: str) -> list[int]:
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments * 100}}],
        }
        return keys_of(
            messages=[SYSTEM, message, {"role": "tool", "tool_call_id": "1", "content": "ok " * 200}]
        )

    assert call("a")[-1] != call("b")[-1]


@pytest.mark.parametrize(
    "prompt",
    ["word " * 200, ["word " * 200], list(range(500)), [list(range(500))]],
    ids=["str", "list", "ids", "id lists"],
)
def test_B024_every_form_of_completion_prompt_has_keys(prompt: object) -> None:
    keys = keys_of(prompt=prompt)
    assert keys and keys == keys_of(prompt=prompt)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"7",
        b"{}",
        b'{"messages": 3}',
        b'{"messages": null}',
        b'{"messages": []}',
        b'{"messages": [3, null, "x", []]}',
        b'{"messages": [{"content": null}]}',
        b'{"messages": [{"role": 3, "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": [null, 1, "x", {"type": "text"}, {"text": 3}]}]}',
        b'{"prompt": null}',
        b'{"prompt": []}',
        b'{"prompt": [1, "a", [2], {}]}',
        b'{"prompt": [-1, 99999999999999999999999999]}',
        b'{"prompt": "\\ud800 lone"}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}], "tools": ["\\ud800"]}',
        b'{"model": 3, "max_tokens": "x", "stream": "yes", "prompt": "a"}',
        b'{"max_tokens": -5, "prompt": "a"}',
        b"\xff\xfe",
        b'{"prompt": "' + b"[" * 5_000 + b'"}',
        b"[" * 5_000,
    ],
)
def test_nothing_raises(body: bytes) -> None:
    prompt = read_prompt(body)
    assert prompt.max_tokens is None or prompt.max_tokens > 0


def test_what_cannot_be_read_is_routed_by_load() -> None:
    assert read_prompt(b"not json") is UNREADABLE and not UNREADABLE.keys


def test_stream_and_limits_are_read() -> None:
    prompt = read_prompt(b'{"model":"m","prompt":"a","stream":true,"max_tokens":7,"max_completion_tokens":5}')
    assert (prompt.model, prompt.stream, prompt.max_tokens, prompt.units) == ("m", True, 5, 1)


def test_B021_the_same_keys_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import json; from router.routing.prompt_blocks import read_prompt as read;"
        'print(json.dumps(list(read(b\'{"model":"m","prompt":"\' + b\'golden \' * 100 + b\'"}\').keys)))'
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    # Golden vector: a change here breaks every fleet that shares state between versions.
    assert [f"{key:016x}" for key in json.loads(runs.pop())] == GOLDEN


GOLDEN = ["7de5f624d9703d3c", "b9693fbf2b3ce39c"]


def test_canonical_text_reads_in_order() -> None:
    text = canonical_text(
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "name": "ann", "content": "U"},
            ],
            "tools": [{"a": 1}],
        }
    )
    assert text == b'\x1dtools\x1f[{"a":1}]\x1esystem\x1fS\x1euser\x1fU\x1dname\x1fann'
