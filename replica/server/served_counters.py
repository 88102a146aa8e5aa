"""Counters of what other replicas asked of this one."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServedCounters:
    """Questions by how they ended, and what was given."""

    whole: int = 0
    """Questions that got every block."""
    partial: int = 0
    """Got fewer: the rest was not there any more."""
    busy: int = 0
    refused: int = 0
    """Another secret, another model, or no question."""
    broken: int = 0
    """The peer left, or took too long."""
    blocks: int = 0
    size_bytes: int = 0
