"""How many users there are when: a ramp and a spike, chosen by ``LOAD_SHAPE``.

``LOAD_USERS`` is the most, ``LOAD_SECONDS`` the whole length.
"""

import os

from locust import LoadTestShape

from tests.load.user_counts import ramp, spike

USERS = int(os.environ.get("LOAD_USERS", "12"))
SECONDS = float(os.environ.get("LOAD_SECONDS", "20"))


class _Shape(LoadTestShape):
    abstract = True
    of_time = staticmethod(ramp)

    def tick(self) -> tuple[int, float] | None:
        """(users, how many come or go in a second); ``None``: the end."""
        share = self.get_run_time() / SECONDS
        if share >= 1.0:
            return None
        users = self.of_time(share, USERS)
        return users, float(USERS)


class Ramp(_Shape):
    """See ``ramp``."""

    abstract = False


class Spike(_Shape):
    """See ``spike``."""

    abstract = False
    of_time = staticmethod(spike)


SHAPES = {"ramp": Ramp, "spike": Spike}
