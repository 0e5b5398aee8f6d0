"""The end of processes that this process started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from typing import Any


def wait_or_kill(processes: Iterable[subprocess.Popen[Any]], seconds: float) -> None:
    """Wait until all processes have ended, and kill those that run after a number of seconds."""
    limit = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(limit - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
