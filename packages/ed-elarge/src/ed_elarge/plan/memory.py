"""`MemoryParts`: the parts of one device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device by part, and the bytes that a program can use."""

    parts: Mapping[str, int]
    limit: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def free(self) -> int:
        """Bytes that remain; negative = missing."""
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        """Whether all parts fit."""
        return self.free >= 0
