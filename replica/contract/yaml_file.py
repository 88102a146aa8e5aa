"""YAML in which a key that is given twice is an error, and not silently the last one's value."""

from collections.abc import Sequence
from typing import Any

import yaml


class YamlError(ValueError):
    """What is wrong, and in which line. The line itself is not shown: it may hold a secret."""


class _Loader(yaml.SafeLoader):
    """Looks at mappings as they are written: before merge keys (``<<``) bring in those of others."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, yaml.ScalarNode] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                raise YamlError(
                    f"line {key.start_mark.line + 1}: the key {key.value!r} is given twice, "
                    f"first in line {first[key.value].start_mark.line + 1}; keep one of them"
                )
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except YamlError:
            raise
        except ValueError as error:  # it looks like a date or a number, and is none
            line = node.start_mark.line + 1
            raise YamlError(f"line {line}: {error}; put quotes around it if it is text") from None


def read_yaml(text: str) -> object:
    """The value of the one document in ``text``. Raises ``YamlError``.

    >>> read_yaml("a: 1\\nb: {c: 2}\\na: 3")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    replica.contract.yaml_file.YamlError: line 3: the key 'a' is given twice, first in line 1; ...
    >>> read_yaml("a: 1\\nb: 2026-13-01")
    Traceback (most recent call last):
    replica.contract.yaml_file.YamlError: line 2: month must be in 1..12; put quotes around it if it is text
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise YamlError(f"{where}{error.problem}") from None
    except yaml.YAMLError as error:  # characters that no YAML may have
        raise YamlError(str(error)) from None
    except RecursionError:
        raise YamlError("lists or mappings are nested too deeply") from None


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, where the key at ``path`` stands in ``text``, or the last of its parents that does.

    >>> line_of("a: 1\\nb:\\n  - c: 2\\n    d: 3", ["b", 0, "d"])
    4
    """
    node, line = yaml.compose(text, _Loader), None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            at = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if at is None:
                break
            line, node = at[0].start_mark.line + 1, at[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
