"""vllm-router 0.1.17 ``kv_aware``: (new + active prefill tokens) x (active requests + 1).

The same product as LMetric's, with an index fed by KV events and credits for lower tiers (host 0.8, external
0.6, disk 0.3; there is one tier here). Selection and reservation are atomic, as they are here. Source: its
``policies/kv_aware.rs`` as read in September 2026.
"""

from sim.rivals.lmetric import LMetric


class VllmRouterKvAware(LMetric):
    """Promise: that of LMetric."""
