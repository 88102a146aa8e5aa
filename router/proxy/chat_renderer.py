"""A model's chat template in a jinja2 sandbox, with what ``transformers`` and vLLM give to templates.

Needs ``jinja2`` (extra ``[exact]``). Templates come from the operator; messages, which clients write, are
data to them.
"""

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.proxy.chat_request import Chat, NotExact


class _Generation(Extension):
    """``{% generation %}`` marks what the model says, for training; it renders as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatRenderer:
    """A compiled template and the special tokens it may name.

    >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    >>> chat = Chat([{"role": "user", "content": "hi"}], None, True, {}, False)
    >>> ChatRenderer(source, {"eos_token": "</s>"}).render(chat)
    '<user>hi</s>'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ``ValueError`` when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.parts_as_list = _loops_over_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, chat: Chat) -> str:
        """The prompt text. Raises ``NotExact`` when the template refuses or fails."""
        variables = {**self._special_tokens, **chat.variables}
        try:
            return self._template.render(
                {
                    **variables,
                    "messages": chat.messages,
                    "tools": chat.tools,
                    "documents": None,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except Exception as error:  # a template may fail in any way its author did not think of
            raise NotExact("template") from error


def _loops_over_content(template: nodes.Template) -> bool:
    """The template goes through the parts of a message's content, so vLLM hands it the parts."""
    for loop in template.find_all(nodes.For):
        for node in (loop.iter, *loop.iter.find_all(nodes.Node)):
            if isinstance(node, nodes.Getattr) and node.attr == "content":
                return True
            if (
                isinstance(node, nodes.Getitem)
                and isinstance(node.arg, nodes.Const)
                and node.arg.value == "content"
            ):
                return True
    return False


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
