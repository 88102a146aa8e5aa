"""What to say of a key of a YAML file that is unknown, or has a plain value where keys were expected."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

NO_MAPPING = frozenset({"model_type", "model_attributes_type", "dict_type"})
"""Pydantic's names for a plain value or a list where keys belong."""

NO_LIST = frozenset({"tuple_type", "list_type"})
"""Pydantic's names for what is no list where one belongs."""


def list_expected(path: Sequence[str | int], given: object) -> str:
    """For ``given`` at ``path``, where a list belongs.

    >>> list_expected(["tags"], "h100"), list_expected(["tags"], None)
    ('expected a list, as in `tags: [h100]`', 'expected a list with `- ` before each entry')
    """
    if isinstance(given, str) and path:
        return f"expected a list, as in `{path[-1]}: [{given}]`"
    return "expected a list with `- ` before each entry"


def spelling_hint(root: Any, path: Sequence[str | int]) -> str:
    """For the unknown key at ``path`` below ``root``: the key there that looks like it, else all of them.

    >>> class Slo(BaseModel):
    ...     ttft_ms: float = 1.0
    >>> class File(BaseModel):
    ...     slo: Slo = Slo()
    >>> spelling_hint(File, ["slo", "tttf_ms"]), spelling_hint(File, ["ttft_ms"])
    ('is it ttft_ms?', 'remove it or check its spelling; expected some of slo')
    """
    sections = _sections_at(root, path[:-1])
    names = sorted({name for section in sections for name in section.model_fields})
    if like := get_close_matches(str(path[-1]), names, n=1):
        return f"is it {like[0]}?"
    return f"remove it or check its spelling; expected some of {', '.join(names)}"


def keys_expected(root: Any, path: Sequence[str | int], given: object) -> str:
    """For ``given`` at ``path``, where a mapping belongs: an example with it, or the keys there are.

    >>> class Server(BaseModel):
    ...     url: str
    >>> class File(BaseModel):
    ...     server: Server
    >>> keys_expected(File, ["server"], "http://a:1")
    'expected keys and values below it, as in `server: {url: http://a:1}`'
    """
    said = "expected keys and values below it"
    sections = _sections_at(root, path)
    if len(sections) != 1 or not sections[0].model_fields:
        return said
    (section,) = sections
    first, field = next(iter(section.model_fields.items()))
    if isinstance(given, str) and (field.is_required() or first == "kind"):
        entry = f"{first}: {given}"
        last = path[-1] if path else 0
        return f"{said}, as in `{f'- {entry}' if isinstance(last, int) else f'{last}: {{{entry}}}'}`"
    return f"{said}: {', '.join(section.model_fields)}"


def _sections_at(root: Any, path: Sequence[str | int]) -> list[type[BaseModel]]:
    """The sections that may stand at ``path``, in which pydantic names the chosen kind of a union, too."""
    here = list(_sections(root))
    for part in path:
        below = [section.model_fields[part].annotation for section in here if part in section.model_fields]
        if below:
            here = [section for one in below for section in _sections(one)]
        else:
            here = [section for section in here if part in _kinds(section)] or here
    return here


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _sections(part)


def _kinds(section: type[BaseModel]) -> tuple[Any, ...]:
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)
