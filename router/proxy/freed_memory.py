"""Memory of bodies that were passed on is kept for the next ones, instead of going back to the kernel.

glibc gives the end of the heap back as soon as about half a MiB of it is free, and has each page zeroed when
it takes it again: with prompts of 256 KiB that is a tenth of what a request costs.
"""

import ctypes
from typing import Final

KEPT_BYTES: Final = 64 * 1024 * 1024
"""Free memory at the heap's end that the process keeps."""
MAPPED_FROM_BYTES: Final = 32 * 1024 * 1024
"""Larger pieces are mapped one by one and given back at once: the most that glibc sets by itself."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""``mallopt`` parameters, from glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Set this for the whole process. False where the C library has no such setting (musl, macOS)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES))
