"""Replicas from a file: read when it changed, used whole or not at all."""

import asyncio

from pydantic import TypeAdapter, ValidationError

from replica.contract.yaml_file import YamlError, read_yaml
from router.config_errors import ConfigError, describe
from router.discovery.source import Found, SourceStatus
from router.discovery_config import FileDiscovery
from router.replica_config import ReplicaConfig
from router.watched_file import WatchedFile

_LIST = TypeAdapter(tuple[ReplicaConfig, ...])


class FileSource:
    """One file."""

    def __init__(self, config: FileDiscovery) -> None:
        self._config = config
        self._file = WatchedFile(config.path)

    async def watch(self, found: Found, status: SourceStatus) -> None:
        """As ``Source`` says."""
        while True:
            try:
                replicas = await asyncio.to_thread(self.look)
            except ConfigError as error:
                status.failed(str(error))
            except OSError as error:
                status.failed(f"cannot be read: {error.strerror}; expected a list of replicas")
            else:
                if replicas is not None:
                    status.well()
                    found(replicas)
            await asyncio.sleep(self._config.interval_s)

    def look(self) -> tuple[ReplicaConfig, ...] | None:
        """The replicas, if the file changed since the last look that gave some or failed.

        Raises ``ConfigError`` when it is wrong, ``OSError`` when it cannot be read.
        """
        path = self._config.path
        try:
            text = self._file.look()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8: {error.reason}") from None
        return None if text is None else read_replicas(text, path)


def read_replicas(text: str, where: str) -> tuple[ReplicaConfig, ...]:
    """The list in ``text``. Raises ``ConfigError`` that names ``where``, line and key.

    >>> [one.url for one in read_replicas("- url: http://a:1", "x")]
    ['http://a:1']
    """
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    if not isinstance(data, list):
        raise ConfigError(f"{where}: expected a list of replicas ([] for none), got {type(data).__name__}")
    try:
        replicas = _LIST.validate_python(data)
    except ValidationError as error:
        raise ConfigError(describe(error, where, text, ReplicaConfig)) from None
    names = [replica.effective_name for replica in replicas]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: replica names must differ; twice: {', '.join(twice)}")
    binding = [one.effective_name for one in replicas if one.kv_events is not None and one.kv_events.binds]
    if binding:
        raise ConfigError(
            f"{where}: {', '.join(binding)}: kv_events for which this router listens belong to `replicas` in "
            "its own config; here name the replica's host"
        )
    return replicas
