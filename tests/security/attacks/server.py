"""A server in a separate process with a scripted engine, and its client."""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.security.attacks.requests import Ask

MAX_MODEL_LEN = 2**17
SERVER = f"""
import pathlib, tempfile
from ed_esurge.server import serve
from ed_esurge.testing import ScriptedEngine
from tests.security.attacks.tenants import options

class Forgetful(dict):
    # The scripted engine records its requests for tests, which is no memory of the server.
    def __setitem__(self, key, value):
        pass

with tempfile.TemporaryDirectory() as folder:
    engine = ScriptedEngine(max_model_len={MAX_MODEL_LEN})
    engine.requests, engine.options = Forgetful(), Forgetful()
    serve(engine, port=0, trust_request_chat_template=True, **options(pathlib.Path(folder)))
"""


class Client:
    """A client that sends each request to one server over a new connection.

    Args:
        port: port of the server.
        pid: id of the process of the server.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid

    def ask(self, request: Ask) -> tuple[int, float, int]:
        """Return status, seconds and bytes of a response; status 0 means a cut connection."""
        path, kind, body = request
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began = time.perf_counter()
        try:
            connection.request("POST", path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, time.perf_counter() - began, len(content)
        except OSError:
            return 0, time.perf_counter() - began, 0
        finally:
            connection.close()

    def health(self) -> float:
        """Return the seconds of one `GET /health`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        return time.perf_counter() - began


@contextmanager
def running() -> Iterator[Client]:
    """Run a server in a separate process and yield a client."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        yield Client(int(url.split(":")[2].split("/")[0]), process.pid)
    finally:
        process.terminate()
        process.wait(60)
