"""A file that is looked at now and then, and read when it changed.

It is told by time, size and inode, so that it may lie on any file system. One that was put in place of
another is read at once; one that is written in place is read when it stayed the same from one look to the
next.
"""

import errno
import os
import stat
from pathlib import Path

_Mark = tuple[int, int, int]


class WatchedFile:
    """One file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._read: _Mark | None = None
        """As it was when it was read last."""
        self._seen: _Mark | None = None
        """As it was when it was looked at last."""

    def look(self) -> str | None:
        """Its text, if it changed since the last look that gave one or failed.

        Raises ``OSError`` when it cannot be read, ``UnicodeDecodeError`` when it is not UTF-8. What is no
        regular file, as a pipe, is not opened: nobody may ever write to it.
        """
        path = self.path
        try:
            mark = _mark(path)
            in_place = self._read is not None and mark[0] == self._read[0]
            still = mark == self._seen
            self._seen = mark
            if mark == self._read or (in_place and not still):
                return None
            data = Path(path).read_bytes()
            if _mark(path) != mark:
                return None
        except OSError:
            self._read = self._seen = None
            raise
        self._read = mark
        return data.decode()


def _mark(path: str) -> _Mark:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", path)
    return found.st_ino, found.st_mtime_ns, found.st_size
