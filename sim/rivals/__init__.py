"""The table of other routers' rules: a dict from name to class is the whole registry."""

import random
from collections.abc import Callable

from router.routing.view import Policy

RIVALS: dict[str, Callable[[random.Random], Policy]] = {}
