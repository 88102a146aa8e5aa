"""The keys of ``tiers:`` in a replica's YAML."""

from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from replica.config_values import Section
from replica.contract.prefill_cost import PrefillCost
from replica.engine_limits import TierLimits
from replica.peers_config import PeersConfig
from replica.prefill_speed import ASSUMED

MIB = 2**20


class TiersConfig(Section):
    """Where KV goes that the device has no room for, and from where it comes back."""

    host_mib: NonNegativeInt = 0
    """Memory for it."""
    disk_path: Path | None = None
    """A folder of this replica's own; what fits no more, or is another model's, is deleted there."""
    disk_mib: PositiveInt | None = None
    """Room in that folder."""
    disk_write_mib_per_day: NonNegativeInt | None = None
    """Written at most, so that the disk lives as long as it was bought for; no limit unless set."""
    prefill_us_per_token: PositiveFloat | None = None
    """What computing a token costs, which fetching it must beat; measured unless set."""

    peers: PeersConfig | None = None
    """Other replicas; none unless set."""

    def limits(self) -> TierLimits:
        """For the engine."""
        per_day, per_token_us = self.disk_write_mib_per_day, self.prefill_us_per_token
        prefill = None
        if per_token_us is not None:
            prefill = PrefillCost(ASSUMED.fixed_s, per_token_us * 1e-6, ASSUMED.attention_tokens)
        return TierLimits(
            host_bytes=self.host_mib * MIB,
            disk_folder=self.disk_path.expanduser() if self.disk_path is not None else None,
            disk_bytes=(self.disk_mib or 0) * MIB,
            disk_bytes_per_day=None if per_day is None else per_day * MIB,
            prefill=prefill,
            peers=self.peers.limits() if self.peers is not None else None,
        )

    @model_validator(mode="after")
    def _fits(self) -> "TiersConfig":
        if (self.disk_path is None) != (self.disk_mib is None):
            raise ValueError("disk_path and disk_mib belong together: give both or neither")
        if not self.host_mib and self.disk_path is None and self.peers is None:
            raise ValueError(
                "no tier: give host_mib, or disk_path and disk_mib, or peers, or leave tiers out"
            )
        return self
