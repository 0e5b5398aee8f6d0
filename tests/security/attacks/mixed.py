"""A mixed load of honest and hostile requests: the memory and the answers of the server."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.security.attacks.requests import ROUTES, Ask, as_json
from tests.security.attacks.server import Client

#: Fields that differ between equal answers.
_CHANGING = frozenset(("id", "created", "created_at", "completed_at", "request_id"))
#: Statuses of limits, after which a client sends its request again.
_BUSY = (429, 503)
#: Seconds of an answer from which a hostile request is sent less often.
_SHORT = 0.02
#: Seconds after the load in which the server may free its memory.
_REST = 10.0


@dataclass
class MixedResult:
    """What a mixed load measured.

    Attributes:
        requests: number of requests.
        honest: number of honest answers.
        different: number of honest answers that differ from those before the load.
        busy: number of honest requests that a limit of the server refused.
        statuses: number of answers to hostile requests by status.
        health: sorted seconds of `GET /health` during the load.
        before, peak, after: bytes of memory of the server and its child processes.
    """

    requests: int = 0
    honest: int = 0
    different: int = 0
    busy: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    health: list[float] = field(default_factory=list)
    before: int = 0
    peak: int = 0
    after: int = 0


def remove_changing(value: Any) -> Any:
    """Return a JSON value without the fields that differ between equal answers."""
    if isinstance(value, dict):
        return {key: remove_changing(item) for key, item in value.items() if key not in _CHANGING}
    if isinstance(value, list):
        return [remove_changing(item) for item in value]
    return value


def list_processes(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:  # the process has ended
                continue
    return found


def read_memory(pid: int) -> int:
    """Return the bytes of memory of a process and its descendants; shared pages count once."""
    total = 0
    for one in list_processes(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def read_answer(port: int, request: Ask) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    path, kind, body = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def run_mixed_load(
    client: Client,
    hostile: dict[str, Ask],
    count: int,
    *,
    senders: int = 8,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> MixedResult:
    """Send honest and hostile requests in a random order from several threads.

    All kinds of hostile requests together take about equal times.

    Args:
        client: the client of the server.
        hostile: the hostile requests.
        count: number of requests.
        senders: number of threads.
        seed: seed of the order.
        sleep: waits after the load.
    """
    result, lock = MixedResult(), threading.Lock()
    honest = {path: as_json(path, body) for path, body in ROUTES.items()}
    expected = {path: _read_honest(client.port, request) for path, request in honest.items()}
    # The first request of each kind loads modules, and the second has the usual time.
    seconds = [min(client.ask(request)[1] for _ in range(2)) for request in hostile.values()]
    sleep(_REST)
    result.before = result.peak = read_memory(client.pid)
    rng = random.Random(seed)
    names, weights = list(hostile), [_SHORT / max(each, _SHORT) for each in seconds]
    plan = [
        rng.choice(list(honest)) if rng.random() < 0.5 else rng.choices(names, weights)[0]
        for _ in range(count)
    ]
    waiting = iter(plan)

    def send() -> None:
        while True:
            with lock:
                name = next(waiting, None)
            if name is None:
                return
            if name not in honest:
                status, _, _ = client.ask(hostile[name])
                with lock:
                    result.requests += 1
                    result.statuses[status] = result.statuses.get(status, 0) + 1
                continue
            status, body = read_answer(client.port, honest[name])
            with lock:
                result.requests += 1
                if status in _BUSY:
                    result.busy += 1
                    continue
                result.honest += 1
                result.different += status != 200 or _parse(body) != expected[name]

    threads = [threading.Thread(target=send) for _ in range(senders)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        result.health.append(client.health())
        result.peak = max(result.peak, read_memory(client.pid))
        time.sleep(0.05)
    sleep(_REST)
    result.after = read_memory(client.pid)
    result.health.sort()
    return result


def _read_honest(port: int, request: Ask) -> Any:
    status, body = read_answer(port, request)
    assert status == 200, body[:500]
    return _parse(body)


def _parse(body: bytes) -> Any:
    try:
        return remove_changing(json.loads(body))
    except ValueError:
        return body
