"""What the sections of a replica's YAML have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Keys that are set once; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def endpoint_alone(value: Any) -> Any:
    """A plain text where a section may stand is its ``endpoint``."""
    return {"endpoint": value} if isinstance(value, str) else value
