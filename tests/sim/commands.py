"""A command run inside the test, its exit code as a shell sees it."""

from collections.abc import Sequence

import warmroute


def exit_code(arguments: Sequence[str]) -> int:
    """Of ``warmroute ARGUMENTS``; 2 where argparse refuses them."""
    try:
        return warmroute.main(list(arguments))
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code
