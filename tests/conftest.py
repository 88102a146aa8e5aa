"""The suite tests the sources that are here, not an older compiled form of them, and times nothing."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from router.compiled import stale_modules
from router.log_lines import HANDLER

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a checkout whose compiled modules are older than their sources."""
    stale = stale_modules()
    if stale:
        pytest.exit(
            f"{stale[0]} changed after it was compiled: run make compile, or make pure to run the sources",
            returncode=2,
        )


@pytest.fixture(autouse=True)
def _no_log_handler_is_left() -> Iterator[None]:
    """Of a whole command that ran in this process: what it would write to is closed by the next test."""
    yield
    root = logging.getLogger()
    for handler in [one for one in root.handlers if one.name == HANDLER]:
        root.removeHandler(handler)
