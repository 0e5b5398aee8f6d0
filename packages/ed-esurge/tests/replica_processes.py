"""Servers with replicas in processes, for tests."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = """
--dtype float32 --sharding-axis-dims 1,1,1,1,1 --max-model-len 128 --max-num-batched-tokens 64
--max-num-seqs 8 --max-num-seq-buckets 8 --page-size 16 --no-compile-runner --silent-mode
--drain-seconds 5 --log-level warning
"""


class ReplicaServer:
    """A server process.

    Attributes:
        url: base URL of the API.
        log: the printed lines.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process, self.url, self.log = process, url, log

    @property
    def replicas(self) -> list[int]:
        """Ids of the processes of the replicas, in order of their start."""
        pid = self.process.pid
        children = []
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
        return sorted(child for child in children if "join" in words_of(child))

    @property
    def num_ready(self) -> int:
        """Number of replicas that have reported since their start."""
        return len(self.metric("vllm:num_requests_running"))

    def metric(self, name: str) -> dict[str, float]:
        """Return the values of a metric by the label `engine`."""
        import httpx

        text = httpx.get(self.url.replace("/v1", "/metrics"), timeout=60).text
        found = re.findall(rf'^{name}{{engine="(\d+)".*}} (\S+)$', text, re.MULTILINE)
        return {engine: float(value) for engine, value in found}


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[ReplicaServer]:
    """Start a server process, and end it by SIGTERM after the block."""
    command = [sys.executable, "-m", "ed_esurge", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(
        [*command, *shlex.split(FLAGS), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log: list[str] = []
    assert process.stdout is not None
    thread = threading.Thread(target=lambda: log.extend(iter(process.stdout.readline, "")))
    thread.start()
    try:
        url = None
        while url is None:
            assert process.poll() is None, "".join(log)
            url = re.search(r"serving at (\S+)", "".join(log))
            time.sleep(0.05)
        yield ReplicaServer(process, url[1], log)
        process.terminate()
        assert process.wait(60) == 0, "".join(log)
    finally:
        process.kill()
        process.wait()
        thread.join(10)
