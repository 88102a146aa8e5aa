"""The keys under ``cache_salt:`` in a replica's YAML."""

from typing import Literal

from pydantic import model_validator

from replica.config_values import Secret, Section
from replica.contract.cache_salt import LEAST_SECRET_CHARACTERS
from replica.server.salt_rule import SaltRule


class SaltsConfig(Section):
    """Whose cache salts are taken."""

    accept: Literal["none", "signed", "any"] = "none"
    """``signed``: those that a router with the same key made. ``any``: whatever a client says."""
    key: Secret | None = None
    """The router's ``tenants.salt_signing_key``."""

    @model_validator(mode="after")
    def _key_fits(self) -> "SaltsConfig":
        if (self.key is not None) != (self.accept == "signed"):
            raise ValueError("key belongs to accept: signed, and that needs it")
        if self.key is not None and len(self.key.get_secret_value()) < LEAST_SECRET_CHARACTERS:
            raise ValueError(f"key: expected at least {LEAST_SECRET_CHARACTERS} characters")
        return self

    def rule(self) -> SaltRule:
        """For the code below."""
        key = None if self.key is None else self.key.get_secret_value().encode()
        return SaltRule(self.accept, key)
