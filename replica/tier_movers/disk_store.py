"""KV blocks as files: one file per block, written whole or not at all, checked whenever it is read.

    FOLDER/lock                                   one process at a time
    FOLDER/budget                                 what is left of the day's writes, as another process left it
    FOLDER/kv-FINGERPRINT/BLOCK HASH IN HEX       header, then the block's bytes

Of other fingerprints (other weights, other block size) nothing is kept. Nothing is flushed to the platter: a
file that a crash left half-written fails its check like any other damage, and is computed again.
"""

import contextlib
import fcntl
import shutil
import stat
import struct
import zlib
from pathlib import Path

MAGIC = b"wrkv0001"
_HEADER = struct.Struct("<8s32sQI")
"""Magic, block hash, length of the bytes, their CRC-32."""
UNFINISHED = ".part"
MOST_BUDGET_BYTES = 1_024


class CorruptBlock(Exception):
    """A block's file is missing, damaged, or another block's."""


class DiskStore:
    """The files of one replica. Any thread may read; one writes and deletes."""

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int) -> None:
        """Makes ``folder`` if need be. Raises OSError when it cannot be used or another process uses it."""
        self.block_bytes = block_bytes
        self._folder = folder / f"kv-{fingerprint}"
        self._budget = folder / "budget"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise OSError(error.errno, f"{folder} is in use by another replica; give each its own") from None
        for other in folder.glob("kv-*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Let another process have the folder."""
        self._lock.close()

    def found(self) -> list[bytes]:
        """Hashes of the blocks an earlier process left, oldest first; what cannot be one is deleted.

        What can be neither looked at nor deleted stays: it is no reason not to start.
        """
        blocks: list[tuple[int, bytes]] = []
        for file in self._folder.iterdir():
            name = _hash_of(file.name)
            with contextlib.suppress(OSError):
                about = file.lstat()
                if stat.S_ISREG(about.st_mode) and name and about.st_size == _HEADER.size + self.block_bytes:
                    blocks.append((about.st_mtime_ns, name))
                else:
                    file.unlink()
        return [name for _, name in sorted(blocks)]

    def write(self, block_hash: bytes, payload: memoryview) -> int:
        """Store a block's bytes; their checksum. Raises OSError, leaving nothing, when that fails."""
        checksum = zlib.crc32(payload)
        unfinished = self._folder / (block_hash.hex() + UNFINISHED)
        try:
            with unfinished.open("wb", buffering=0) as file:
                for part in (_HEADER.pack(MAGIC, block_hash, len(payload), checksum), payload):
                    if file.write(part) != len(part):
                        raise OSError(f"{unfinished}: the disk took only a part")
            unfinished.replace(self._file(block_hash))
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return checksum

    def read(self, block_hash: bytes, checksum: int | None) -> bytearray:
        """A block's bytes, checked. ``checksum``: what it must be, if that is known.

        Raises CorruptBlock for a file that is not what was written, OSError when the disk fails.
        """
        content = bytearray(_HEADER.size + self.block_bytes + 1)
        try:
            with self._file(block_hash).open("rb", buffering=0) as file:
                length = 0
                while count := file.readinto(memoryview(content)[length:]):
                    length += count
        except FileNotFoundError:
            raise CorruptBlock(f"block {block_hash.hex()}: its file is gone") from None
        if length != len(content) - 1:
            raise CorruptBlock(f"block {block_hash.hex()}: {length} bytes, expected {len(content) - 1}")
        header = _HEADER.unpack_from(content)
        payload = content[_HEADER.size : -1]
        found = zlib.crc32(payload)
        if header != (MAGIC, block_hash, self.block_bytes, found) or checksum not in (None, found):
            raise CorruptBlock(f"block {block_hash.hex()}: its bytes are not those that were written")
        return payload

    def budget_record(self) -> bytes | None:
        """What ``keep_budget`` kept, of whatever fingerprint; empty if it cannot be read, None if never."""
        try:
            with self._budget.open("rb") as file:
                return file.read(MOST_BUDGET_BYTES)
        except FileNotFoundError:
            return None
        except OSError:
            return b""

    def keep_budget(self, record: bytes) -> None:
        """Keep a record in place of the one before. Raises OSError, leaving that one, when that fails."""
        unfinished = self._budget.with_suffix(UNFINISHED)
        unfinished.write_bytes(record)
        unfinished.replace(self._budget)

    def delete(self, block_hash: bytes) -> None:
        """Delete a block's file, if it is there. Raises OSError when the disk fails."""
        self._file(block_hash).unlink(missing_ok=True)

    def _file(self, block_hash: bytes) -> Path:
        return self._folder / block_hash.hex()


def _hash_of(file_name: str) -> bytes | None:
    try:
        name = bytes.fromhex(file_name)
    except ValueError:
        return None
    return name if len(name) == 32 and name.hex() == file_name else None
