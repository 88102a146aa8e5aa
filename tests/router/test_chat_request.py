"""What a request's prompt is made of, in each engine's dialect; and what cannot be known here."""

import json
from typing import Any

import pytest

from router.proxy.chat_request import Chat, Dialect, NotExact, PlainText, TokenIds, prompt_of

DIALECTS: tuple[Dialect, ...] = ("vllm", "warmroute")
USER = {"role": "user", "content": "hi"}


def chat(request: dict[str, Any], dialect: Dialect = "vllm", *, parts_as_list: bool = False) -> Chat:
    prompt = prompt_of({"messages": [USER]} | request, dialect, parts_as_list=parts_as_list)
    assert isinstance(prompt, Chat)
    return prompt


def why_not(request: dict[str, Any], dialect: Dialect = "vllm") -> str:
    with pytest.raises(NotExact) as caught:
        prompt_of(request, dialect, parts_as_list=False)
    return caught.value.reason


@pytest.mark.parametrize("dialect", DIALECTS)
def test_content_in_every_form_is_the_same_text(dialect: Dialect) -> None:
    forms: list[Any] = [
        "hi",
        [{"type": "text", "text": "hi"}],
        ["hi"],
        [{"type": "input_text", "text": "hi"}],
    ]
    for form in forms:
        assert chat({"messages": [{"role": "user", "content": form}]}, dialect).messages == [USER]
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat({"messages": [{"role": "user", "content": two}]}, dialect).messages
    assert message["content"] == "a\nb"
    (message,) = chat({"messages": [{"role": "assistant", "content": None}]}, dialect).messages
    assert message["content"] == ""


def test_templates_that_loop_over_parts_get_parts_from_vllm() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = {"messages": [{"role": "user", "content": parts}]}
    assert chat(request, "vllm", parts_as_list=True).messages[0]["content"] == parts
    assert chat(request, "warmroute", parts_as_list=True).messages[0]["content"] == "a\nb"


def test_vllm_keeps_the_fields_it_knows_and_our_replica_all() -> None:
    message = {"role": "user", "content": "hi", "name": "ann", "refusal": None, "odd": 1}
    assert chat({"messages": [message]}, "vllm").messages == [USER | {"name": "ann"}]
    assert chat({"messages": [message]}, "warmroute").messages == [message]


def test_developers_are_systems_for_our_replica() -> None:
    message = {"role": "developer", "content": "be kind"}
    assert chat({"messages": [message]}, "vllm").messages[0]["role"] == "developer"
    assert chat({"messages": [message]}, "warmroute").messages[0]["role"] == "system"


def test_vllm_reads_tool_arguments() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    request = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call('{"x": [1]}'), call("")]}]
    }
    (message,) = chat(request, "vllm").messages
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [{"x": [1]}, {}]
    (message,) = chat(request, "warmroute").messages
    assert message["tool_calls"] == [call('{"x": [1]}'), call("")]
    assert request["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"x": [1]}', "untouched"  # type: ignore[index]
    for broken in ([call("{")], ["f"], [{"function": None}], 7):
        assert why_not({"messages": [{"role": "assistant", "tool_calls": broken}]}) == "tools"


def test_vllm_writes_tools_out_in_its_own_order() -> None:
    tool = {
        "function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"},
        "type": "function",
    }
    (written,) = chat({"tools": [tool]}, "vllm").tools or []
    assert json.dumps(written) == json.dumps(
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": None,
                "parameters": {"b": 1, "a": 2},
                "strict": True,
            },
        }
    )
    assert chat({"tools": [tool]}, "warmroute").tools == [tool]
    assert chat({"tools": []}).tools is None and chat({"tools": None}).tools is None
    assert chat({"tools": [tool], "tool_choice": "none"}, "warmroute").tools is None
    request = {"messages": [USER], "tools": [tool], "tool_choice": "none"}
    assert why_not(request) == "tools", "it depends on how vLLM was started"
    for broken in ([7], "f", [{"type": "function"}], [{"function": {"name": 7}}]):
        assert why_not({"messages": [USER], "tools": broken}) == "tools"


def test_flags_and_variables() -> None:
    asked = chat({"add_generation_prompt": False, "chat_template_kwargs": {"enable_thinking": False}})
    assert asked.add_generation_prompt is False and asked.variables == {"enable_thinking": False}
    assert chat({}).add_generation_prompt is True and chat({}).add_special_tokens is False
    assert chat({"add_special_tokens": True}).add_special_tokens is True
    assert chat({"continue_final_message": False, "documents": None}).messages == [USER]


def test_completions() -> None:
    assert prompt_of({"prompt": "a"}, "vllm", parts_as_list=False) == PlainText("a", True)
    asked = {"prompt": "a", "add_special_tokens": False}
    assert prompt_of(asked, "vllm", parts_as_list=False) == PlainText("a", False)
    assert prompt_of({"prompt": [1, 2]}, "vllm", parts_as_list=False) == TokenIds([1, 2])


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({}, "shape"),
        ({"prompt": None}, "shape"),
        ({"prompt": []}, "shape"),
        ({"prompt": ["a", "b"]}, "shape"),
        ({"prompt": [[1], [2]]}, "shape"),
        ({"prompt": [1, "a"]}, "shape"),
        ({"prompt": [True]}, "shape"),
        ({"input": "a"}, "shape"),
        ({"messages": []}, "shape"),
        ({"messages": "hi"}, "shape"),
        ({"messages": ["hi"]}, "shape"),
        ({"messages": [{"content": "hi"}]}, "shape"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "shape"),
        ({"messages": [{"role": "user", "content": 7}]}, "shape"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "shape"),
        ({"messages": [USER], "add_generation_prompt": "yes"}, "shape"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "parts"),
        ({"messages": [{"role": "user", "content": [7]}]}, "parts"),
        ({"messages": [USER | {"reasoning_content": "hm"}]}, "reasoning"),
        ({"messages": [USER], "chat_template": "{{ x }}"}, "options"),
        ({"messages": [USER], "documents": [{}]}, "options"),
        ({"messages": [USER], "continue_final_message": True}, "options"),
        ({"prompt": "a", "truncate_prompt_tokens": 5}, "options"),
    ],
)
def test_what_cannot_be_known_says_why(request_: dict[str, Any], reason: str) -> None:
    assert why_not(request_) == reason


def test_template_variables_do_not_reach_our_replica() -> None:
    assert why_not({"messages": [USER], "chat_template_kwargs": {"x": 1}}, "warmroute") == "options"
