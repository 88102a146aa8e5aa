"""The chat template's rendering: the same text as ``transformers`` makes, in a sandbox that holds."""

import json
from datetime import datetime
from typing import Any

import pytest

from router.proxy.chat_renderer import ChatRenderer
from router.proxy.chat_request import Chat, NotExact

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] %}{% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate') }}
  {% endif %}
  {% if loop.first and system is defined %}{{ '[INST] ' + system + '\\n' }}{% endif %}
  {{- message['content'] | trim }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}"""
TOOLS = """{%- if tools %}{{ '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}{% endfor %}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{- '<call>' ~ c.function.name ~ (c.function.arguments if c.function.arguments is string
    else c.function.arguments | tojson) }}{% endfor %}{% endif %}{{ m.role ~ ':' ~ m.content }}
{%- if loop.index > 3 %}{% break %}{% endif %}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<no-think>{% endif %}"""
PARTS = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""
TRAINING = """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}"""
DATED = (
    "{{ strftime_now('%Y') }}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
)

MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be <b>brief</b> & kind"},
        {"role": "user", "content": "  größe 中文 😀 "},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"q": "ä<"}}}],
    },
    {"role": "tool", "content": "r", "tool_call_id": "1"},
]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d <é>", "parameters": {"type": "object"}},
}


def chat(messages: list[dict[str, Any]], **changes: Any) -> Chat:
    return Chat(
        messages,
        changes.get("tools"),
        changes.get("add_generation_prompt", True),
        changes.get("variables", {}),
        False,
    )


@pytest.mark.parametrize("source", [CHATML, STRICT, TOOLS, PARTS, TRAINING, DATED])
@pytest.mark.parametrize("messages", [*MESSAGES, CALLED])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("generate", [True, False])
def test_the_text_is_what_transformers_makes(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = chat(messages, tools=tools, add_generation_prompt=generate, variables={"enable_thinking": False})
    try:
        (expected,), _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=generate,
            enable_thinking=False,
            **SPECIAL,
        )
    except Exception:
        with pytest.raises(NotExact):
            ChatRenderer(source, SPECIAL).render(asked)
        return
    assert ChatRenderer(source, SPECIAL).render(asked) == expected


def test_the_strict_template_was_refused_somewhere() -> None:
    with pytest.raises(NotExact) as caught:
        ChatRenderer(STRICT, SPECIAL).render(chat([{"role": "assistant", "content": "b"}]))
    assert caught.value.reason == "template"


@pytest.mark.parametrize(
    ("source", "as_list"),
    [
        (CHATML, False),
        (PARTS, True),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for p in (messages[0]['content'] | list) %}{{ p }}{% endfor %}", True),
        ("{% for m in messages if m.content %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_templates_that_loop_over_content_parts_are_recognised(source: str, as_list: bool) -> None:
    assert ChatRenderer(source, {}).parts_as_list is as_list


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'] | nothing_known }}",
    ],
)
def test_whatever_a_template_does_wrong_is_not_exact(source: str) -> None:
    try:
        renderer = ChatRenderer(source, {})
    except ValueError as error:
        assert "does not compile" in str(error)
        return
    with pytest.raises(NotExact):
        renderer.render(chat(MESSAGES[0]))


def test_messages_are_data() -> None:
    text = "{{ 7 * 7 }} {% for x in [1] %}"
    assert text in ChatRenderer(CHATML, {}).render(chat([{"role": "user", "content": text}]))


def test_variables_of_a_request_cannot_replace_its_messages() -> None:
    asked = chat(MESSAGES[0], variables={"messages": [], "tools": [1], "bos_token": "<x>"})
    assert (
        ChatRenderer("{{ bos_token }}{{ messages | length }}{{ tools }}", SPECIAL).render(asked) == "<x>1None"
    )


def test_dates_and_json() -> None:
    rendered = ChatRenderer(DATED, {}).render(chat(MESSAGES[2]))
    assert rendered == f"{datetime.now().year}5"
    source = "{{ messages | tojson(sort_keys=true) }}"
    expected = json.dumps(MESSAGES[1], ensure_ascii=False, sort_keys=True)
    assert ChatRenderer(source, {}).render(chat(MESSAGES[1])) == expected
