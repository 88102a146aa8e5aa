"""Replicas from a file: read when it changed, used whole or not at all.

The file is looked at by time, size and inode, so that it may lie on any file system. One that was put in
place of another is read at once; one that is written in place is read when it stayed the same from one look
to the next.
"""

import asyncio
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from router.config import ConfigError, describe
from router.discovery.source import Found, SourceStatus
from router.discovery_config import FileDiscovery
from router.replica_config import ReplicaConfig
from router.yaml_file import YamlError, read_yaml

_LIST = TypeAdapter(tuple[ReplicaConfig, ...])
_Mark = tuple[int, int, int]


class FileSource:
    """One file."""

    def __init__(self, config: FileDiscovery) -> None:
        self._config = config
        self._read: _Mark | None = None
        """As it was when it was read last."""
        self._seen: _Mark | None = None
        """As it was when it was looked at last."""

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
            mark = _mark(path)
            in_place = self._read is not None and mark[0] == self._read[0]
            still = mark == self._seen
            self._seen = mark
            if mark == self._read or (in_place and not still):
                return None
            text = Path(path).read_text(encoding="utf-8")
            if _mark(path) != mark:
                return None
        except OSError:
            self._read = self._seen = None
            raise
        except UnicodeDecodeError as error:
            self._read = mark
            raise ConfigError(f"{path}: not UTF-8: {error.reason}") from None
        self._read = mark
        return read_replicas(text, path)


def _mark(path: str) -> _Mark:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


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
        raise ConfigError(describe(error, where, text)) from None
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
