"""The table of policies: a dict from ``kind`` to class is the whole registry."""

import random
from collections.abc import Callable

from router.routing.policies.bounded_hash import BoundedHash
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.power_of_two import PowerOfTwo
from router.routing.policies.predicted_finish import PredictedFinish
from router.routing.policies.prefix_affinity import PrefixAffinity
from router.routing.policies.random_choice import RandomChoice
from router.routing.policies.round_robin import RoundRobin
from router.routing.policies.session import Session
from router.routing.view import Policy

POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "bounded_hash": BoundedHash,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "predicted_finish": PredictedFinish,
    "prefix_affinity": PrefixAffinity,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "session": Session,
}
