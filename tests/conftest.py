"""The suite tests the sources that are here, not an older compiled form of them, and times nothing."""

import pytest
from hypothesis import settings

from router.compiled import stale_modules

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
