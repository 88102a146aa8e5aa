"""What the sections of a replica's YAML have in common."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class Section(BaseModel):
    """Keys that are set once; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def endpoint_alone(value: Any) -> Any:
    """A plain text where a section may stand is its ``endpoint``."""
    return {"endpoint": value} if isinstance(value, str) else value


def host_and_port(value: str) -> str:
    """``value``, if it is HOST:PORT; raises ValueError otherwise."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"expected HOST:PORT, got {value!r}")
    return value


def _secret(value: Any) -> Any:
    """From the value itself, ``${VARIABLE}`` or ``{file: PATH}``."""
    if isinstance(value, dict) and list(value) == ["file"]:
        try:
            value = Path(str(value["file"])).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file cannot be read: {error}") from None
    elif isinstance(value, str) and (variable := _VARIABLE.fullmatch(value)):
        value = os.environ.get(variable[1])
        if value is None:
            raise ValueError(f"the environment variable {variable[1]} is not set")
    if isinstance(value, str) and not value:
        raise ValueError("expected at least one character")
    return value


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
