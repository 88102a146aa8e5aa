"""What is wrong with a config, in words: a line for each wrong key, with its place in the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from replica.contract.key_hints import NO_LIST, NO_MAPPING, keys_expected, list_expected, spelling_hint
from replica.contract.yaml_file import line_of
from router.config_values import SECRET_KEYS, Section, masked_url

MOST_SHOWN = 300
"""Characters of a wrong value that are repeated: what is refused may come through the admin port."""


class ConfigError(Exception):
    """The config is wrong: what, where, what was expected, what to do."""


@contextmanager
def named_in_errors(file: str | None) -> Iterator[None]:
    """Every ``ConfigError`` from inside begins with the name of the config ``file``, if there is one."""
    try:
        yield
    except ConfigError as error:
        if file is None:
            raise
        raise ConfigError(f"{file}: {error}") from None


def describe(error: ValidationError, where: str, text: str | None, root: type[Section]) -> str:
    """One line per wrong key: where, what was given, what was expected.

    ``text``: of the file, for its lines; ``root``: what was read from it.
    """
    lines = []
    file = where
    errors = error.errors()
    within = {one["loc"][:-1] for one in errors}
    for one in errors:
        line = None if text is None else line_of(text, one["loc"])
        where = file if line is None else f"{file}: line {line}"
        if one["type"] == "too_short":
            if any(loc[: len(one["loc"])] == one["loc"] for loc in within):
                continue  # what is in the list was refused: that is said already
            lines.append(f"{where}: {'.'.join(map(str, one['loc']))}: empty; expected at least 1 entry")
            continue
        key = ".".join(str(part) for part in one["loc"])
        at = f"{where}: {key}: " if key else f"{where}: "
        if one["type"] == "extra_forbidden":
            lines.append(f"{at}unknown key, {spelling_hint(root, one['loc'])}")
            continue
        secret = not SECRET_KEYS.isdisjoint(one["loc"])
        message = one["msg"].removeprefix("Value error, ")
        given = one["input"]
        shown = None if secret else masked_url(given) if isinstance(given, str) else given
        if one["type"] in NO_MAPPING:
            message = keys_expected(root, one["loc"], shown)
        elif one["type"] in NO_LIST:
            message = list_expected(one["loc"], shown)
        got = "" if one["type"] == "missing" or secret else _shown(one["input"])
        lines.append(f"{at}{message}{'' if got[2:-1] in message else got}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        value = masked_url(value)
        if len(value) > MOST_SHOWN:
            value = value[:MOST_SHOWN] + "…"
    return f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""
