"""What commands print alike: JSON on standard output, a complaint on standard error."""

import sys

import orjson

_JSON = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS


def print_json(value: object) -> None:
    """``value`` for programs, indented."""
    print(orjson.dumps(value, option=_JSON).decode())


def complain(command: str, message: object, code: int) -> int:
    """Say on standard error what ``warmroute COMMAND`` could not do; returns ``code``, its exit code."""
    print(f"warmroute {command}: {message}", file=sys.stderr)
    return code
