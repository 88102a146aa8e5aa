"""The table of other routers' rules: a dict from name to class is the whole registry."""

import random
from collections.abc import Callable

from router.routing.view import Policy
from sim.rivals.dualmap import DualMap
from sim.rivals.dynamo_cost import DynamoCost
from sim.rivals.first_block_hash import FirstBlockHash
from sim.rivals.least_requests import LeastRequests
from sim.rivals.llmd_sticky import LlmdSticky
from sim.rivals.llmd_weighted import LlmdWeighted
from sim.rivals.lmetric import LMetric
from sim.rivals.longest_match import LongestMatch
from sim.rivals.min_ttft import MinTtft
from sim.rivals.preble import PrebleE2
from sim.rivals.prequal import Prequal
from sim.rivals.sglang_cache_aware import SglangCacheAware
from sim.rivals.vllm_router_kv_aware import VllmRouterKvAware

RIVALS: dict[str, Callable[[random.Random], Policy]] = {
    "dualmap": DualMap,
    "dynamo_cost": DynamoCost,
    "first_block_hash": FirstBlockHash,
    "least_requests": LeastRequests,
    "llmd_sticky": LlmdSticky,
    "llmd_weighted": LlmdWeighted,
    "lmetric": LMetric,
    "longest_match": LongestMatch,
    "min_ttft": MinTtft,
    "preble_e2": PrebleE2,
    "prequal": Prequal,
    "sglang_cache_aware": SglangCacheAware,
    "vllm_router_kv_aware": VllmRouterKvAware,
}
