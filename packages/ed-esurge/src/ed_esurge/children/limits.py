"""Limits of a forked child: processor time, elapsed time and memory."""

from __future__ import annotations

import resource
import signal
import sys


def limit_time(cpu_seconds: float, wall_seconds: float) -> None:
    """End this process after a processor time from now, or after an elapsed time from now."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def limit_memory(count: int) -> None:
    """Limit the memory of this process to its present size and `count` bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":  # other systems do not enforce this limit
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = size + count
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
