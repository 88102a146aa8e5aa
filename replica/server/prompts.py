"""From a request body to prompts: messages through the chat template, text or token ids as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replica.model.chat_template import ChatTemplate, TemplateRefusal
from replica.model.tokenizer import Tokenizer
from replica.server.client_error import ClientError
from replica.server.fields import Fields

MOST_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; ``text`` is ``None`` when it came as token ids."""

    tokens: tuple[int, ...]
    text: str | None


class PromptReader:
    """Knows the model's tokenizer, template, vocabulary and context."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab: int, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab = vocab
        self.max_model_len = max_model_len
        self._longest_token = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.size))

    def chat(self, body: Fields) -> Prompt:
        """The prompt of a chat request."""
        if self._template is None:
            raise ClientError("this model has no chat template; use /v1/completions with a plain prompt")
        messages = read_messages(body)
        tools = self._tools(body)
        continue_final = body.boolean("continue_final_message", False)
        add_generation_prompt = body.boolean("add_generation_prompt", not continue_final)
        if continue_final and add_generation_prompt:
            raise ClientError(
                "continue_final_message and add_generation_prompt cannot both be true; drop one of them",
                param="continue_final_message",
            )
        try:
            text = self._template.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
            )
        except TemplateRefusal as refusal:
            raise ClientError(str(refusal), param="messages") from refusal
        tokens = self._encode(text, "messages", body.boolean("add_special_tokens", False))
        return self._checked(tokens, text, "messages")

    def completion(self, body: Fields) -> list[Prompt]:
        """The prompts of a completion request: a string, strings, token ids, or lists of them."""
        given = body.given("prompt")
        if given is None:
            raise ClientError(
                "prompt is missing; give a string, a list of strings, token ids, or a list of token id lists",
                param="prompt",
            )
        special = body.boolean("add_special_tokens", True)
        if isinstance(given, str):
            return [self._from_text(given, special)]
        if isinstance(given, list) and given:
            if all(_is_token(one) for one in given):
                return [self._from_tokens(given)]
            if len(given) > MOST_PROMPTS:
                raise ClientError(
                    f"prompt: {len(given)} prompts in one request, at most {MOST_PROMPTS}; send them apart",
                    param="prompt",
                )
            if all(isinstance(one, str) for one in given):
                return [self._from_text(one, special) for one in given]
            if all(isinstance(one, list) and all(_is_token(token) for token in one) for one in given):
                return [self._from_tokens(one) for one in given]
        raise body.wrong("prompt", "a string, a list of strings, token ids, or a list of token id lists")

    def _from_text(self, text: str, special: bool) -> Prompt:
        return self._checked(self._encode(text, "prompt", special), text, "prompt")

    def _from_tokens(self, tokens: Sequence[int]) -> Prompt:
        for token in tokens:
            if not 0 <= token < self._vocab:
                raise ClientError(
                    f"prompt: token id {token} is not in the vocabulary of {self._vocab} tokens",
                    param="prompt",
                )
        return self._checked(tokens, None, "prompt")

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        size = len(text.encode("utf-8"))
        if size > self._longest_token * self.max_model_len:
            # No need to tokenize megabytes to know that they do not fit.
            raise self._too_long(f"at least {-(-size // self._longest_token)}", param)
        return self._tokenizer.encode(text, add_special_tokens=special)

    def _checked(self, tokens: Sequence[int], text: str | None, param: str) -> Prompt:
        if not tokens:
            raise ClientError(f"{param}: the prompt is empty; give at least one token", param=param)
        if len(tokens) >= self.max_model_len:
            raise self._too_long(str(len(tokens)), param)
        return Prompt(tuple(tokens), text)

    def _too_long(self, tokens: str, param: str) -> ClientError:
        return ClientError(
            f"This model's maximum context length is {self.max_model_len} tokens, prompt and output "
            f"together. However, your prompt has {tokens} tokens. Please reduce the length of the prompt.",
            param=param,
        )

    def _tools(self, body: Fields) -> list[dict[str, Any]] | None:
        tools, choice = body.given("tools"), body.given("tool_choice")
        if tools is not None and (
            not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools)
        ):
            raise body.wrong("tools", "a list of tool definitions")
        if choice not in (None, "none", "auto"):
            raise body.wrong("tool_choice", "'none' or 'auto' (this replica cannot force a tool call)")
        if not tools or choice == "none":
            return None
        assert self._template is not None
        if "tools" not in self._template.source:
            raise ClientError(
                "tools: this model's chat template has no place for tool definitions; "
                "send the request without tools or describe them in the system message",
                param="tools",
            )
        return tools


def read_messages(body: Fields) -> list[dict[str, Any]]:
    """The conversation with every content as one text.

    Raises:
        ClientError: which message is wrong, and how.
    """
    messages = body.given("messages")
    if messages is None:
        raise ClientError(
            'messages is missing; give a list like [{"role": "user", "content": "Hello"}]', param="messages"
        )
    if not isinstance(messages, list):
        raise body.wrong("messages", 'a list of messages like {"role": "user", "content": "Hello"}')
    if not messages:
        raise ClientError(
            "messages is empty; provide at least one message for the chat template", param="messages"
        )
    read = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ClientError(f"{where}: expected an object with role and content", param=where)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ClientError(
                f"{where}.role: expected one of system, user, assistant, tool", param=f"{where}.role"
            )
        text = _content_text(message.get("content"), role, f"{where}.content")
        read.append({**message, "role": "system" if role == "developer" else role, "content": text})
    return read


def _content_text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise ClientError(f"{where} is missing or null; give a string", param=where)
    if not isinstance(content, list):
        raise ClientError(f"{where}: expected a string or a list of text parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text"):
            raise ClientError(
                f"{where}[{index}]: content of type {kind!r} is not supported; this model reads text only, "
                'as {"type": "text", "text": "..."}',
                param=f"{where}[{index}]",
            )
        if not isinstance(text, str):
            raise ClientError(f"{where}[{index}].text: expected a string", param=f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
