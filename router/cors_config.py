"""The keys under ``cors:`` in the router's YAML."""

import re

from pydantic import NonNegativeInt, field_validator

from router.config_values import Section

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+")


class CorsConfig(Section):
    """Web pages of other origins that may use the public port from a browser."""

    origins: tuple[str, ...] | None = None
    """``https://app.example``, or ``*``: any. Unless set: any where the port wants a key, for pages without
    one get nowhere; where it wants none, replicas answer for themselves."""
    max_age_s: NonNegativeInt = 600
    """A browser may remember for so long what it was told."""

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for origin in value or ():
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"expected * or SCHEME://HOST[:PORT] without a path, got {origin!r}")
        return value
