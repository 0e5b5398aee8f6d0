"""A server in a process of its own, with its own folder for compiled programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

SECONDS = 900
#: The server in a process without torch, which transformers would import.
PROGRAM = (
    "import sys; sys.modules['torch'] = None\n"
    "from ed_esurge.command.main import main\n"
    "raise SystemExit(main())"
)


@contextmanager
def running(words: Sequence[str], cache: Path) -> Iterator[str]:
    """Run `esurge serve` during the block, and yield the address of the API.

    Args:
        words: further words of the command line.
        cache: folder for compiled programs.

    Raises:
        RuntimeError: the server did not start.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}
    command = ["serve", "--port", "0", "--log-level", "warning", *words]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = next((m[1] for m in map(_address, process.stdout) if m), None)
            if url is None:
                errors.seek(0)
                raise RuntimeError(f"the server did not start:\n{errors.read()[-2000:]}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


def pending(url: str) -> int:
    """Return the number of programs that a server compiles in the background."""
    answer = httpx.get(url.replace("/v1", "/health"), timeout=SECONDS).json()
    return int(answer.get("programs_pending", 0))


def _address(line: str) -> re.Match[str] | None:
    return re.search(r"serving at (\S+)", line)
