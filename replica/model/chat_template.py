"""A conversation to the prompt text the model was trained on: the model's own template, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from replica.model.shape import ModelError


class TemplateRefusal(ValueError):
    """The template does not accept this conversation; the message is its own."""


class ChatTemplate:
    """A compiled chat template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: bos_token, eos_token and the like. Raises ModelError for broken templates."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of ``messages`` ({"role", "content", ...}; content is text).

        ``continue_final_message`` leaves the last message open, so that the model goes on with it.

        Raises:
            TemplateRefusal: the template raised, or failed on these messages.
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # the template is any program, the messages are anybody's
            raise TemplateRefusal(f"the model's chat template refuses these messages: {error}") from error
        if continue_final_message:
            final = str(messages[-1].get("content") or "").rstrip()
            at = text.rfind(final)
            if final and at >= 0:
                text = text[: at + len(final)]
        return text


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
