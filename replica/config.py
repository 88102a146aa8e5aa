"""Every key of a replica's YAML: default, unit, limits.

A setting is written once, here; the code below receives plain values. Unknown keys are errors.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from replica.cache_config import CacheConfig
from replica.config_values import Section, endpoint_alone, host_and_port
from replica.contract.key_hints import NO_LIST, NO_MAPPING, keys_expected, list_expected, spelling_hint
from replica.contract.yaml_file import YamlError, line_of, read_yaml
from replica.kv_events_config import KvEventsConfig
from replica.salts_config import SaltsConfig
from replica.tiers_config import TiersConfig

DEFAULT_KV_TOKENS = 65_536
DEFAULT_KV_BYTES = 3 * 2**30


SECRET_KEYS = frozenset({"key", "secret", "router_key"})
"""What stands under these keys is never shown, however wrong it is."""


class ConfigError(Exception):
    """The config is wrong: what, where, what was expected, what to do."""


class ReplicaConfig(Section):
    """One replica."""

    model: Annotated[str, Field(min_length=1)]
    """``smollm2``, ``tiny``, ``tiny-hybrid``, a .gguf file, or a Hugging Face folder."""
    listen: Annotated[str, AfterValidator(host_and_port)] = "127.0.0.1:8000"
    """HOST:PORT; port 0 takes a free one."""
    served_model_name: str | None = None
    """The name in requests and answers; the model's own unless set."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and KV. bf16 halves their memory, but for matrices of up to 1 GiB in all, which are kept in
    fp16 too (for decode); on CPUs without bf16 arithmetic it is slower."""
    weights: Literal["dense", "int8", "int4", "file"] = "dense"
    """``dense`` in ``dtype``; packed, 128 to a scale: ``int8``, ``int4``; as a GGUF packs them: ``file``."""
    kv_dtype: Literal["same", "int8"] = "same"
    """``int8``: K and V of a token and head share a scale; half of bf16's memory, a quarter of fp32's."""
    seed: int = 0
    """Of the tiny model's weights, and of requests that name no seed."""
    threads: PositiveInt | None = None
    """Cores for one step; all of the machine's unless set."""

    kv_tokens: PositiveInt | None = None
    """Tokens the KV cache holds; 65,536 or what fits in 3 GiB unless set. Memory is taken as it
    fills, 256 MiB ahead."""
    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    """Tokens in a KV block."""
    prefix_caching: bool = True
    cache: CacheConfig = CacheConfig()
    tiers: TiersConfig | None = None
    """Memory below the KV cache's; none unless set."""
    state_slots: PositiveInt | None = None
    """Recurrent states kept, of running requests and for restarts; twice ``max_running`` unless set."""
    max_running: PositiveInt = 32
    """Requests in one step."""
    max_batched_tokens: PositiveInt = 512
    """Tokens in one step; a longer prompt is computed in chunks."""
    max_chunk_tokens: PositiveInt | None = None
    """Tokens of one prompt in one step, so that several prompts share it; no limit of its own unless set."""
    longest_prefix_first: bool = False
    """Among waiting requests of one priority the longest cached prefix goes first, not the first come."""
    max_overtaken: NonNegativeInt = 16
    """How often a request may be overtaken so before it is next."""
    shares_prefills: bool = True
    """Of waiting requests with one new prefix the first computes it; else each computes it."""
    max_model_len: PositiveInt | None = None
    """Tokens of a prompt and its output; the model's context or the KV cache's size unless set."""
    batch_invariant: bool = False
    """The same bits whatever else is in a step: slower decode when few requests run."""

    kv_events: Annotated[KvEventsConfig | None, BeforeValidator(endpoint_alone)] = None
    """Where blocks stored and removed are told; not told unless set."""

    cache_salt: SaltsConfig = SaltsConfig()
    """Whose cache salts are taken."""

    max_body_mib: PositiveInt = 64
    """Largest request body."""
    hang_s: PositiveFloat = 60.0
    """A step that takes longer makes /health answer 503, until it ends."""
    drain_s: NonNegativeInt = 10
    """On SIGTERM, running requests may go on for this long."""

    @model_validator(mode="after")
    def _fits(self) -> "ReplicaConfig":
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens {self.max_batched_tokens} is less than max_running {self.max_running}: "
                "every running request needs a token per step"
            )
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens {self.kv_tokens} is less than one block of {self.block_size} tokens")
        if self.block_size % (self.cache.settings().page_size or 1):
            raise ValueError(
                f"block_size {self.block_size} is no multiple of cache.page_size {self.cache.page_size}"
            )
        for key, value in (("kv_events", self.kv_events), ("tiers", self.tiers)):
            if value is not None and not self.prefix_caching:
                raise ValueError(
                    f"{key} without prefix_caching has nothing to do; remove one of the two keys"
                )
        if self.batch_invariant and self.weights != "dense":
            raise ValueError(
                f"batch_invariant with weights {self.weights}: packed weights take another kernel for "
                "many rows; use dense weights or remove batch_invariant"
            )
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``listen``."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    def kv_blocks(self, bytes_per_token: int) -> int:
        """Blocks of the KV cache of a model whose KV takes this many bytes per token.

        >>> ReplicaConfig(model="smollm2").kv_blocks(46_080)              # 65,536 tokens are 2.8 GiB
        4096
        >>> ReplicaConfig(model="big").kv_blocks(1_000_000)               # 3 GiB
        201
        """
        tokens = self.kv_tokens or min(DEFAULT_KV_TOKENS, DEFAULT_KV_BYTES // bytes_per_token)
        return max(1, tokens // self.block_size)


def parse_config(data: Any, where: str, text: str | None = None) -> ReplicaConfig:
    """The config in ``data``; raises ``ConfigError`` naming every wrong key, and its line in ``text``."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of keys, got {type(data).__name__}")
    try:
        return ReplicaConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error, where, text))) from None


def load_config(path: str | Path) -> ReplicaConfig:
    """Read ``path``; raises ``ConfigError`` when it cannot be read or is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        raise ConfigError(f"{path}: empty; expected at least `model: smollm2`")
    return parse_config(data, str(path), text)


def _lines(error: ValidationError, file: str, text: str | None) -> list[str]:
    """One line per wrong key: where, what was given, what was expected."""
    lines = []
    for one in error.errors():
        line = None if text is None else line_of(text, one["loc"])
        where = file if line is None else f"{file}: line {line}"
        key = ".".join(str(part) for part in one["loc"])
        at = f"{where}: {key}: " if key else f"{where}: "
        if one["type"] == "extra_forbidden":
            lines.append(f"{at}unknown key, {spelling_hint(ReplicaConfig, one['loc'])}")
            continue
        secret = SECRET_KEYS.intersection(str(part) for part in one["loc"])
        given = None if secret else one["input"]
        message = one["msg"].removeprefix("Value error, ")
        if one["type"] in NO_MAPPING:
            message = keys_expected(ReplicaConfig, one["loc"], given)
        elif one["type"] in NO_LIST:
            message = list_expected(one["loc"], given)
        got = f"got {given!r}" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"{at}{message}{'' if got in message else f' ({got})'}")
    return lines
