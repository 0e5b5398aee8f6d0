"""Memory of this machine that the process may still use."""

from __future__ import annotations

import os
from pathlib import Path

#: Directory of the limits of a container (cgroup v2), as the container sees it.
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping, within the limit of a container.

    Where the system does not state them, half of the memory is assumed.
    """
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return max(0, min(free, _within_container(free)))


def _within_container(otherwise: int) -> int:
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        # Pages of files count as used, but the system can drop them.
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return otherwise if most == "max" else int(most) - used + int(stat["file"])
    except (OSError, KeyError, ValueError):
        return otherwise
