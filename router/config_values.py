"""The kinds of values that keys of the router's YAML have: addresses, secrets."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr, ValidationInfo, field_validator

SECRET_KEYS = frozenset(
    {"api_key", "headers", "keys", "kv_source_key", "password", "salt_secret", "salt_signing_key"}
)
"""What stands under these keys is never shown, however wrong it is."""

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_CREDENTIALS = re.compile(r"//.*@")
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9])?")
_PATH_PATTERN = re.compile(r"([A-Z]+ )?/[\w.~!$&'()*+,=:@/-]*", re.ASCII)
_TARGET = re.compile(r"/[\x21\x22\x24-\x7e]*")
_TOKEN = re.compile(r"[\x21-\x7e]+")


class Section(BaseModel):
    """A mapping of keys: unknown ones are errors, nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _meant(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's yes, no, on and off are no numbers, and only secrets are read from the environment."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            words = "another value, or quotes around it"
            if get_origin(kind) is Literal:
                words = " or ".join(get_args(kind))
            raise ValueError(f"expected {words}; YAML reads on, off, yes and no as true and false")
        if isinstance(value, str) and _VARIABLE.search(value) and "SecretStr" not in repr(kind):
            raise ValueError("only secrets are read from the environment; write the value")
        return value


def _is_address(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected HOST:PORT or unix:/path")
    if value.startswith("unix:"):
        if len(value) <= len("unix:"):
            raise ValueError("expected unix:/path/of/socket")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"expected HOST:PORT or unix:/path, got {value!r}")
    return value


Address = Annotated[str, BeforeValidator(_is_address)]


def _is_host_name(value: object) -> str:
    if not isinstance(value, str) or not _HOST_NAME.fullmatch(value.lower()):
        raise ValueError("expected a host name, without port and without *")
    return value.lower()


HostName = Annotated[str, BeforeValidator(_is_host_name)]


def _is_path_pattern(value: object) -> str:
    if not isinstance(value, str) or not _PATH_PATTERN.fullmatch(value):
        raise ValueError(
            "expected a path, a method before it if need be, * for anything: /v1/files/*, DELETE /v1/files/*"
        )
    return value


PathPattern = Annotated[str, BeforeValidator(_is_path_pattern)]


def _is_target(value: object) -> str:
    if not isinstance(value, str) or not _TARGET.fullmatch(value):
        raise ValueError(f"expected a path that begins with /, without spaces and #, got {value!r}")
    return value


Target = Annotated[str, BeforeValidator(_is_target)]
"""What is asked of a server whose URL stands elsewhere: a path, with a query if need be."""


def _secret(value: object) -> SecretStr:
    """From the value itself, ``${VARIABLE}`` or ``{file: PATH}``; read when the config is."""
    if isinstance(value, SecretStr):
        return value
    if isinstance(value, dict) and list(value) == ["file"] and isinstance(value["file"], str):
        found = _in_file(value["file"])
    elif isinstance(value, str):
        variable = _VARIABLE.fullmatch(value)
        found = value if variable is None else _in_environment(variable[1])
    else:
        raise ValueError("expected a secret, ${VARIABLE} or {file: PATH}")
    if not _TOKEN.fullmatch(found):
        raise ValueError("expected visible ASCII characters without spaces, at least one, in one line")
    return SecretStr(found)


def _in_environment(variable: str) -> str:
    value = os.environ.get(variable)
    if value is None:
        raise ValueError(f"the environment variable {variable} is not set")
    return value


def _in_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the file {path} is not ASCII") from None


def masked_url(value: str) -> str:
    """``value`` without the credentials, if it is a URL that has some.

    >>> masked_url("redis://me:secret@10.0.0.1:6379/0")
    'redis://**********@10.0.0.1:6379/0'
    """
    return _CREDENTIALS.sub("//**********@", value)


def without_credentials(value: str) -> str:
    """``value`` without the credentials, and without a sign that it had some.

    >>> without_credentials("redis://me:secret@10.0.0.1:6379/0")
    'redis://10.0.0.1:6379/0'
    """
    return _CREDENTIALS.sub("//", value)


def one_or_several(value: Any) -> Any:
    """A list of one, where one was written without a list."""
    return [value] if isinstance(value, str | dict) else value


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
Secrets = Annotated[tuple[Secret, ...], BeforeValidator(one_or_several)]
