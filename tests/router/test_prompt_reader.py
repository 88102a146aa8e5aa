"""The prompt reader: exact where it can be, text where not; long prompts off the event loop."""

import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import ModelConfig, parse_config
from router.config_errors import ConfigError
from router.proxy import prompt_reader
from router.proxy.counters import Counters
from router.proxy.exact_model import ExactModel, load_exact_model
from router.proxy.prompt_reader import OFF_LOOP_BYTES, PromptReader, make_prompt_reader
from router.routing.block_naming import BlockNaming
from router.routing.prompt_blocks import UNREADABLE, Prompt, read_prompt
from tests.router.tokenizer_folder import SPECIAL, TEMPLATE, byte_tokenizer, write_folder

NAMINGS = (BlockNaming("sha256", 16), BlockNaming("warmroute", 4))
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ExactModel:
    folder = write_folder(tmp_path_factory.mktemp("model"))
    return load_exact_model("m", ModelConfig(tokenizer=str(folder)))


class Reading:
    """A reader and what it answered."""

    def __init__(self, model: ExactModel) -> None:
        self.counters = Counters()
        self.namings = list(NAMINGS)
        self.reader = PromptReader({"m": model}, lambda: self.namings, self.counters)
        self.threads: list[str] = []

    async def read(self, body: bytes | dict[str, Any]) -> tuple[Prompt, bool]:
        """The prompt, and whether it came at once."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        answers: list[Prompt] = []
        came = asyncio.Event()

        def done(prompt: Prompt) -> None:
            self.threads.append(threading.current_thread().name)
            answers.append(prompt)
            came.set()

        self.reader.read(raw, done)
        at_once = bool(answers)
        async with asyncio.timeout(LIMIT_S):
            await came.wait()
        assert len(answers) == 1
        return answers[0], at_once


def read(model: ExactModel, body: bytes | dict[str, Any]) -> tuple[Prompt, bool, Counters]:
    async def run() -> tuple[Prompt, bool, Counters]:
        reading = Reading(model)
        prompt, at_once = await reading.read(body)
        assert set(reading.threads) == {threading.current_thread().name}, "told in the loop's thread"
        return prompt, at_once, reading.counters

    return asyncio.run(run())


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]} | fields


@pytest.mark.parametrize("length", [10, OFF_LOOP_BYTES * 4])
def test_a_chat_is_rendered_tokenized_and_hashed_in_every_naming(model: ExactModel, length: int) -> None:
    text = "the path " * (length // 9)
    prompt, at_once, counters = read(
        model, chat(text, stream=True, max_tokens=7, cache_salt="s", temperature=1)
    )
    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    tokens = byte_tokenizer().encode(rendered, add_special_tokens=False).ids
    assert tokens[0] == byte_tokenizer().token_to_id("<|im_start|>")
    assert prompt.chains == {naming: naming.keys(tokens, "s") for naming in NAMINGS}
    assert prompt.keys == NAMINGS[0].keys(tokens, "s")
    assert prompt.units == len(tokens) and prompt.layout.end(2) == 32
    assert (prompt.model, prompt.stream, prompt.max_tokens) == ("m", True, 7)
    assert at_once == (length == 10), "long ones are read in a thread"
    assert (counters.exact_prompts, counters.text_fallbacks) == (1, {})


def test_completions_get_the_tokenizers_special_tokens(model: ExactModel) -> None:
    bos = byte_tokenizer().token_to_id("<|bos|>")
    plain = byte_tokenizer().encode("once", add_special_tokens=False).ids
    for fields, tokens in (
        ({"prompt": "once"}, [bos, *plain]),
        ({"prompt": "once", "add_special_tokens": False}, plain),
        ({"prompt": [5, 6, 7, 8]}, [5, 6, 7, 8]),
    ):
        prompt, _, _ = read(model, {"model": "m"} | fields)
        assert prompt.units == len(tokens) and prompt.chains is not None
        assert prompt.chains[NAMINGS[1]] == NAMINGS[1].keys(tokens)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts"),
        ({"messages": []}, "shape"),
        ({"chat_template": "x"}, "options"),
        ({"cache_salt": 7}, "shape"),
        ({"messages": None, "prompt": [1, 1 << 40]}, "shape"),
        ({"messages": None, "prompt": [-1 << 40] * 16}, "shape"),
    ],
)
def test_what_is_not_exact_is_read_as_text_and_counted(
    model: ExactModel, changes: dict[str, Any], reason: str, long: bool
) -> None:
    body = chat("hi") | changes | ({"padding": "x" * OFF_LOOP_BYTES} if long else {})
    prompt, at_once, counters = read(model, body)
    text = read_prompt(json.dumps(body).encode())
    assert prompt.chains is None and prompt.keys == text.keys and prompt.units == text.units
    assert counters.text_fallbacks == {reason: 1} and counters.exact_prompts == 0
    assert at_once is not long


def test_token_ids_beyond_32_bits_are_read_as_text(model: ExactModel) -> None:
    prompt, _, counters = read(model, {"model": "m", "prompt": [1 << 40] * 16})
    assert prompt.chains is None and counters.text_fallbacks == {"tokens": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"model": "other", "prompt": "a" * 3 * OFF_LOOP_BYTES},
        {"prompt": "no model"},
        {"model": ["m"], "prompt": "a"},
        {"model": None},
    ],
)
def test_other_models_are_read_as_text_at_once_and_not_counted(
    model: ExactModel, body: dict[str, Any]
) -> None:
    prompt, at_once, counters = read(model, body)
    assert at_once and prompt.chains is None and not counters.text_fallbacks
    assert prompt.keys == read_prompt(json.dumps(body).encode()).keys


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'"m"', b'{"model": "m", "prompt": "\\ud83d"}'])
def test_what_is_no_request_is_unreadable(model: ExactModel, body: bytes) -> None:
    prompt, at_once, _ = read(model, body)
    assert at_once and (prompt is UNREADABLE or prompt.chains is None)


def test_B024_B025_equal_prompts_of_different_forms_have_equal_keys(model: ExactModel) -> None:
    """Parts or text, a string or its token ids."""
    parts = [{"type": "text", "text": "hello there, reader of prompts"}]
    one, _, _ = read(model, chat("hello there, reader of prompts"))
    two, _, _ = read(model, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert one.chains == two.chains
    ids = byte_tokenizer().encode("some text of several blocks").ids
    three, _, _ = read(model, {"model": "m", "prompt": "some text of several blocks"})
    four, _, _ = read(model, {"model": "m", "prompt": ids})
    assert three.chains == four.chains and three.keys


def test_B107_salts_part_tenants(model: ExactModel) -> None:
    prompts = [
        read(model, chat("a" * 100, **salt))[0] for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    keys = [key for prompt in prompts for chain in (prompt.chains or {}).values() for key in chain]
    assert len(set(keys)) == len(keys)


def test_a_flood_of_long_prompts_is_read_roughly_rather_than_late(
    model: ExactModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reader, "MOST_WAITING", 2)
    gate = threading.Event()

    class Slow:
        def tokens(self, request: dict[str, Any]) -> list[int]:
            assert gate.wait(LIMIT_S)
            return model.tokens(request)

    async def run() -> Counters:
        reading = Reading(Slow())  # type: ignore[arg-type]
        long = chat("b" * 2 * OFF_LOOP_BYTES)
        waiting = [asyncio.create_task(reading.read(long)) for _ in range(2)]
        await asyncio.sleep(0)
        prompt, at_once = await reading.read(long)
        assert at_once and prompt.chains is None and not any(task.done() for task in waiting)
        gate.set()
        for task in waiting:
            late, at_once = await task
            assert late.chains is not None and not at_once
        again, _ = await reading.read(long)
        assert again.chains is not None, "the queue is empty again"
        return reading.counters

    counters = asyncio.run(run())
    assert counters.text_fallbacks == {"busy": 1} and counters.exact_prompts == 3


def test_endless_prompts_are_read_as_text_at_once(model: ExactModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reader, "MOST_BYTES", 2 * OFF_LOOP_BYTES)
    for times, reasons in ((1, {}), (3, {"long": 1})):
        prompt, at_once, counters = read(model, chat("e" * times * OFF_LOOP_BYTES))
        assert (prompt.chains is None) == at_once == bool(reasons) and counters.text_fallbacks == reasons


def test_a_fault_of_ours_costs_exactness_and_nothing_else(
    model: ExactModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty:
        def tokens(self, request: dict[str, Any]) -> list[int]:
            raise RuntimeError("a bug")

    for text in ("short", "long" * OFF_LOOP_BYTES):
        prompt, _, counters = read(Faulty(), chat(text))  # type: ignore[arg-type]
        assert prompt.chains is None and prompt.keys == read_prompt(json.dumps(chat(text)).encode()).keys
        assert counters.text_fallbacks == {"fault": 1}
    assert "a bug" in caplog.text


def test_explain_reads_long_prompts_at_once(model: ExactModel) -> None:
    reading = Reading(model)
    body = json.dumps(chat("c" * 3 * OFF_LOOP_BYTES)).encode()
    assert reading.reader.read_now(body).chains is not None
    assert reading.reader.read_now(b"nonsense") is UNREADABLE
    reading.reader.close()


def test_namings_are_asked_for_each_prompt(model: ExactModel) -> None:
    async def run() -> None:
        reading = Reading(model)
        for size in (8, 32):
            reading.namings[:] = [BlockNaming("tokens", size)]
            prompt, _ = await reading.read(chat("d" * 100))
            assert [naming.block_tokens for naming in prompt.chains or {}] == [size]

    asyncio.run(run())


# --- files and packages -------------------------------------------------------------------------------


def loads(folder: Path, **config: Any) -> ExactModel:
    return load_exact_model("m", ModelConfig(**({"tokenizer": str(folder)} | config)))


def test_templates_come_from_the_config_the_folder_or_its_settings(tmp_path: Path) -> None:
    request = chat("hi")
    folder = write_folder(tmp_path / "settings")
    settings = loads(folder).tokens(request)
    named = write_folder(
        tmp_path / "named", template=None, chat_template=[{"name": "default", "template": TEMPLATE}]
    )
    assert loads(named).tokens(request) == settings
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    plain = byte_tokenizer().encode("hi", add_special_tokens=False).ids
    assert loads(folder).tokens(request) == plain
    (tmp_path / "own.jinja").write_text("{{ bos_token }}!")
    write_folder(folder, bos_token={"content": SPECIAL[0]})
    own = loads(folder, chat_template=str(tmp_path / "own.jinja")).tokens(request)
    assert own == byte_tokenizer().encode("<|bos|>!", add_special_tokens=False).ids
    file = loads(folder / "tokenizer.json")
    assert file.tokens({"prompt": "hi"}) == byte_tokenizer().encode("hi").ids


def test_a_model_without_a_template_reads_completions(tmp_path: Path) -> None:
    bare = loads(write_folder(tmp_path, template=None))
    assert bare.tokens({"prompt": [1, 2]}) == [1, 2]
    prompt, _, counters = read(bare, chat("hi"))
    assert prompt.chains is None and counters.text_fallbacks == {"no_template": 1}


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    model = loads(write_folder(tmp_path, tokenizer.to_str()))
    assert len(model.tokens({"prompt": "abcdefgh", "add_special_tokens": False})) == 8


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), "does not compile"),
    ],
)
def test_wrong_files_are_named_at_start(tmp_path: Path, spoil: Callable[[Path], Any], says: str) -> None:
    folder = write_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        loads(folder)
    assert says in str(caught.value) and "models.m" in str(caught.value)


def test_wrong_paths_are_named_at_start(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    for config, says in (
        ({"tokenizer": str(tmp_path / "model.gguf")}, "GGUF"),
        ({"tokenizer": str(tmp_path / "nowhere")}, "does not exist"),
        ({"tokenizer": str(folder), "chat_template": str(tmp_path / "none.jinja")}, "cannot be read"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_exact_model("m", ModelConfig(**config))
        assert says in str(caught.value)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [{"url": "http://h:1"}]
    config = parse_config({"replicas": replicas, "models": {"m": {"tokenizer": str(tmp_path)}}}, "x")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "jinja2" else real(name, *rest)
    )
    with pytest.raises(ConfigError) as caught:
        make_prompt_reader(config, lambda: NAMINGS, Counters())
    assert "jinja2" in str(caught.value) and "warmroute[exact]" in str(caught.value)
    assert make_prompt_reader(parse_config({"replicas": replicas}, "x"), lambda: NAMINGS, Counters()) is None
