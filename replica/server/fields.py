"""Reads fields out of a request's JSON object, each with its type and limits; null counts as absent.

Fields nobody asks for are ignored, as vLLM ignores them: clients send more than a server knows.
"""

import math
from collections.abc import Mapping
from typing import Any

from replica.server.client_error import ClientError

MOST_SHOWN = 60


class Fields:
    """One JSON object of a request; ``name`` stands before its keys in messages."""

    def __init__(self, values: Mapping[str, Any], name: str = "", size_bytes: int = 0) -> None:
        """``size_bytes``: of the decoded body, where the object is all of it."""
        self.values = values
        self.size_bytes = size_bytes
        self._name = name

    def path(self, key: str) -> str:
        """How messages call this key."""
        return f"{self._name}.{key}" if self._name else key

    def wrong(self, key: str, expected: str) -> ClientError:
        """The error for a key whose value is not what was expected."""
        shown = repr(self.values.get(key))
        if len(shown) > MOST_SHOWN:
            shown = shown[:MOST_SHOWN] + "..."
        return ClientError(f"{self.path(key)}: expected {expected}, got {shown}", param=self.path(key))

    def given(self, key: str) -> Any:
        """The value as it is; ``None`` when absent or null."""
        return self.values.get(key)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def integer(self, key: str, least: int | None = None, most: int | None = None) -> int | None:
        """A whole number within its limits; 3.0 counts as one."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        expected = f"a whole number{_limits(least, most)}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, expected)
        if (least is not None and value < least) or (most is not None and value > most):
            raise self.wrong(key, expected)
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        """A number within its limits."""
        value = self.values.get(key)
        if value is None:
            return default
        expected = f"a number{_limits(least, most)}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, expected)
        if not least <= value <= most:
            raise self.wrong(key, expected)
        return float(value)

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def table(self, key: str) -> "Fields | None":
        """A JSON object."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "a JSON object")
        return Fields(value, self.path(key))

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)


def _limits(least: float | None, most: float | None) -> str:
    """
    >>> _limits(0, 2), _limits(1, None), _limits(None, None)
    (' from 0 to 2', ', 1 or more', '')
    """
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return f", {least} or more" if least is not None else ""
