"""Which cache salts a request may bring. A salt opens what is cached under it, so not everybody's counts."""

from dataclasses import dataclass, field
from typing import Literal

from replica.contract.cache_salt import is_signed
from replica.server.client_error import ClientError
from replica.server.fields import Fields

MOST_SALT_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class SaltRule:
    """One replica's.

    >>> SaltRule("any").salt(Fields({"cache_salt": "mine"})), SaltRule().salt(Fields({}))
    ('mine', None)
    """

    accept: Literal["none", "signed", "any"] = "none"
    key: bytes | None = field(default=None, repr=False)
    """For ``signed``."""

    def salt(self, body: Fields) -> str | None:
        """The request's salt, as it is.

        Raises:
            ClientError: it is none, or not one that counts here.
        """
        salt = body.text("cache_salt")
        if salt is None:
            return None
        if not 1 <= len(salt) <= MOST_SALT_CHARACTERS:
            raise ClientError(
                f"cache_salt: expected 1 to {MOST_SALT_CHARACTERS} characters, got {len(salt)}",
                param="cache_salt",
            )
        if self.accept == "none":
            raise ClientError(
                "cache_salt: this replica takes none; leave it out, or set cache_salt.accept in its config",
                param="cache_salt",
            )
        if self.accept == "signed" and (self.key is None or not is_signed(salt, self.key)):
            raise ClientError(
                "cache_salt: expected one that a router has signed with this replica's cache_salt.key",
                param="cache_salt",
            )
        return salt
