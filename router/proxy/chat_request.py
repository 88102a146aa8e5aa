"""From a request to what its prompt is made of, as the engine would see it; or why that cannot be known here.

Engines differ in details, hence the dialects. vLLM keeps the message fields it knows, reads tool arguments
from JSON and writes out every field of a tool definition; our replica passes messages and tools on as they
are. What neither this nor a tokenizer can know (images, templates in the request, several prompts at once) is
``NotExact``: such a request is read as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Dialect = Literal["vllm", "warmroute"]

_KEPT_BY_VLLM = ("name", "tool_calls", "tool_call_id")
_UNKNOWABLE = (
    *("chat_template", "documents", "prompt_embeds", "truncate_prompt_tokens", "mm_processor_kwargs"),
    *("continue_final_message", "reasoning_effort", "echo", "suffix"),
)
_REASONING = ("reasoning", "reasoning_content", "thinking")


class NotExact(Exception):
    """The prompt cannot be rendered and tokenized here; ``reason`` is one word for the counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    """``chat_template_kwargs``."""
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class PlainText:
    """A completion's prompt."""

    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A completion's prompt, tokenized by the client."""

    ids: list[int]


def prompt_of(
    request: Mapping[str, Any], dialect: Dialect, *, parts_as_list: bool
) -> Chat | PlainText | TokenIds:
    """What the request's prompt is made of. Raises ``NotExact``.

    ``parts_as_list``: the template itself loops over a message's content parts; otherwise they are joined.

    >>> prompt_of({"prompt": "once upon"}, "vllm", parts_as_list=False)
    PlainText(text='once upon', add_special_tokens=True)
    >>> chat = prompt_of({"messages": [{"role": "user", "content": "hi"}]}, "vllm", parts_as_list=False)
    >>> chat.messages, chat.add_generation_prompt
    ([{'role': 'user', 'content': 'hi'}], True)
    """
    if any(request.get(field) not in (None, False) for field in _UNKNOWABLE):
        raise NotExact("options")
    if "messages" in request:
        return _chat(request, dialect, parts_as_list)
    prompt = request.get("prompt")
    if type(prompt) is str:
        return PlainText(prompt, _flag(request, "add_special_tokens", True))
    if type(prompt) is list and prompt and all(type(token) is int for token in prompt):
        return TokenIds(prompt)
    raise NotExact("shape")


def _chat(request: Mapping[str, Any], dialect: Dialect, parts_as_list: bool) -> Chat:
    messages = request["messages"]
    if type(messages) is not list or not messages or not all(type(one) is dict for one in messages):
        raise NotExact("shape")
    variables = request.get("chat_template_kwargs") or {}
    if type(variables) is not dict:
        raise NotExact("shape")
    if variables and dialect == "warmroute":
        raise NotExact("options")
    return Chat(
        messages=[_message(one, dialect, parts_as_list) for one in messages],
        tools=_tools(request, dialect),
        add_generation_prompt=_flag(request, "add_generation_prompt", True),
        variables=variables,
        add_special_tokens=_flag(request, "add_special_tokens", False),
    )


def _message(message: dict[str, Any], dialect: Dialect, parts_as_list: bool) -> dict[str, Any]:
    role = message.get("role")
    if type(role) is not str:
        raise NotExact("shape")
    if any(message.get(field) for field in _REASONING):
        raise NotExact("reasoning")
    content = _content(message.get("content"), parts_as_list and dialect == "vllm")
    if dialect == "warmroute":
        return {**message, "role": "system" if role == "developer" else role, "content": content}
    read = {"role": role, "content": content}
    for field in _KEPT_BY_VLLM:
        value = message.get(field)
        if value is not None:
            read[field] = _with_read_arguments(value) if field == "tool_calls" else value
    return read


def _content(content: Any, as_list: bool) -> Any:
    if content is None:
        return ""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise NotExact("shape")
    texts: list[str] = []
    for part in content:
        text = part if type(part) is str else part.get("text") if type(part) is dict else None
        if type(text) is not str or (type(part) is dict and part.get("type") not in ("text", "input_text")):
            raise NotExact("parts")
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if as_list else "\n".join(texts)


def _with_read_arguments(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects instead of JSON text."""
    try:
        read = []
        for call in calls:
            function = dict(call["function"])
            arguments = function.get("arguments")
            function["arguments"] = orjson.loads(arguments) if arguments else {}
            read.append({**call, "function": function})
        return read
    except (TypeError, KeyError, ValueError):
        raise NotExact("tools") from None


def _tools(request: Mapping[str, Any], dialect: Dialect) -> list[dict[str, Any]] | None:
    tools = request.get("tools")
    if not tools:
        return None
    if type(tools) is not list or not all(type(tool) is dict for tool in tools):
        raise NotExact("tools")
    if request.get("tool_choice") == "none":
        if dialect == "warmroute":
            return None
        raise NotExact("tools")  # depends on how the engine was started
    return tools if dialect == "warmroute" else [_written_out(tool) for tool in tools]


def _written_out(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if type(function) is not dict or type(function.get("name")) is not str:
        raise NotExact("tools")
    known: Sequence[str] = ("name", "description", "parameters")
    rest = {key: value for key, value in function.items() if key not in known}
    written = {key: function.get(key) for key in known} | rest
    others = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": tool.get("type", "function"), "function": written} | others


def _flag(request: Mapping[str, Any], field: str, default: bool) -> bool:
    value = request.get(field)
    if value is None:
        return default
    if type(value) is not bool:
        raise NotExact("shape")
    return value
