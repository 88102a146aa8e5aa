"""TLS contexts from the files that the config names; what is wrong with them is said at start."""

import ssl

from router.config import TlsConfig
from router.config_errors import ConfigError
from router.replica_config import ReplicaTlsConfig


class PublicTls:
    """The public port's TLS; certificates can be replaced while it is in use.

    ``context`` stays the same for the listener's life. It hands each new connection on to the certificate
    that was loaded last; connections that exist keep theirs.
    """

    def __init__(self, config: TlsConfig) -> None:
        """Raises ``ConfigError``."""
        self._current = server_context(config)
        self.context = server_context(config)
        self.context.sni_callback = self._hand_on

    def use(self, context: ssl.SSLContext) -> None:
        """New connections get the certificate of ``context``, made by ``server_context``."""
        self._current = context

    def _hand_on(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def server_context(config: TlsConfig) -> ssl.SSLContext:
    """TLS 1.2 or later with the certificate and key of ``config``. Raises ``ConfigError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    key = config.key or config.cert
    for name, path in (("tls.cert", config.cert), ("tls.key", key)):
        _require_readable(name, path)
    try:
        context.load_cert_chain(config.cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls: {config.cert} and {key} are no certificate with its key in PEM form "
            f"({_reason(error)}); the key must be the certificate's and have no password"
        ) from None
    return context


def replica_context(config: ReplicaTlsConfig | None) -> ssl.SSLContext:
    """How an https replica is trusted. Raises ``ConfigError``."""
    context = ssl.create_default_context()
    if config is None:
        return context
    if config.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif config.ca is not None:
        _require_readable("replicas.tls.ca", config.ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(config.ca)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"replicas.tls.ca: {config.ca} holds no certificate in PEM form ({_reason(error)})"
            ) from None
    return context


def _require_readable(key: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


def _no_password() -> str:
    """Instead of asking on the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
