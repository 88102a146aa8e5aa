"""Which options stand on a command line: those that would do nothing beside the others are refused."""

import argparse
from collections.abc import Collection, Sequence
from typing import Any


def note_given(parser: argparse.ArgumentParser) -> None:
    """Of options added from now on, those on the command line are in ``args.given``, as ``--name``."""
    parser.set_defaults(given=frozenset())
    for kind, action in ((None, _Store), ("store", _Store), ("store_true", _StoreTrue), ("append", _Append)):
        parser.register("action", kind, action)


def refuse_given(args: argparse.Namespace, options: Collection[str], why: str) -> None:
    """Raise ValueError if one of ``options`` was given; ``why`` follows their names."""
    found = sorted(args.given & set(options))
    if found:
        raise ValueError(f"{' and '.join(found)} {why}")


class _Noted(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.given = namespace.given | set(self.option_strings[:1])


class _Store(_Noted, argparse._StoreAction):
    pass


class _StoreTrue(_Noted, argparse._StoreTrueAction):
    pass


class _Append(_Noted, argparse._AppendAction):
    pass
