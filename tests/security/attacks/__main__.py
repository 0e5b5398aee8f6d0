"""Measure the server under hostile requests: time per byte of every route, and /health latency.

    python -m tests.security.attacks
    python -m tests.security.attacks --only attacks --senders 4

The server runs in a separate process with a scripted engine, so the times are those of the server.
The first table contains the milliseconds per megabyte for bodies of growing length. A linear route
has the same figure in every column. The second table contains the worst latency of `GET /health`
while several clients repeat one attack. The third table contains the result of 10,000 honest and
hostile requests at once: the latency of `/health`, the memory of the server before and after, and
the number of honest answers that differ from those before the load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from tests.security.attacks import attacks, scenarios
from tests.security.attacks.mixed import run_mixed_load
from tests.security.attacks.requests import LIMIT, ROUTES, Ask, long_body, long_text
from tests.security.attacks.server import Client, running
from tools.bench.measure import command_line, cores, cpu_name, table

SIZES = (2**14, 2**17, 2**20, LIMIT - 2**12)


def canary(client: Client, seconds: float, attack: Callable[[], object] | None) -> list[float]:
    """Return the sorted latencies of `/health` while an attack is repeated."""
    over = threading.Event()
    sender = threading.Thread(target=_repeat, args=(attack, over))
    sender.start()
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        latencies.append(client.health())
        time.sleep(0.01)
    over.set()
    sender.join()
    return sorted(latencies)


def _repeat(attack: Callable[[], object] | None, over: threading.Event) -> None:
    while attack is not None and not over.is_set():
        attack()


def routes(client: Client) -> str:
    """Return the table of milliseconds per megabyte."""
    rows = []
    for path in (*ROUTES, "/v1/files"):
        shapes = {"unknown field": long_body} | ({"text": long_text} if path in ROUTES else {})
        for name, make in shapes.items():
            cells, status = [], 0
            for size in SIZES:
                request = make(path, size)
                results = [client.ask(request) for _ in range(3)]
                status = results[0][0]
                cells.append(f"{min(r[1] for r in results) * 1e3 / len(request[2]) * 1e6:.0f}")
            rows.append([path, name, *cells, str(status)])
    return table(["route", "body", *(f"{size >> 10} KiB" for size in SIZES), "last status"], rows)


def latencies(client: Client, seconds: float, senders: int) -> str:
    """Return the table of latencies of `/health`."""
    idle = canary(client, seconds, None)
    rows = [["none", "", "", "", f"{idle[len(idle) // 2] * 1e3:.0f}", f"{idle[-1] * 1e3:.0f}"]]
    for name, request in attacks().items():
        status, took, size = client.ask(request)

        def together(request: Ask = request) -> None:
            threads = [threading.Thread(target=client.ask, args=(request,)) for _ in range(senders)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        found = canary(client, seconds, together)
        median, worst = found[len(found) // 2] * 1e3, found[-1] * 1e3
        rows.append([name, str(status), str(size), f"{took:.2f}", f"{median:.0f}", f"{worst:.0f}"])
    for name, scenario in scenarios().items():
        began = time.perf_counter()
        attack = partial(scenario, client.port)
        attack()
        took, found = time.perf_counter() - began, canary(client, seconds, attack)
        median, worst = found[len(found) // 2] * 1e3, found[-1] * 1e3
        rows.append([name, "", "", f"{took:.2f}", f"{median:.0f}", f"{worst:.0f}"])
    head = ["attack", "status", "bytes of answer", "seconds", "/health median ms", "worst ms"]
    return table(head, rows)


def mixed(client: Client, seconds: float, count: int) -> str:
    """Return the table of a mixed load."""
    idle = canary(client, seconds, None)
    result = run_mixed_load(client, attacks(), count)
    growth = result.after - result.before
    statuses = ", ".join(f"{status}: {n}" for status, n in sorted(result.statuses.items()))
    rows = [
        ["requests", str(result.requests)],
        ["answers to hostile requests by status", statuses],
        ["honest answers", str(result.honest)],
        ["honest answers that differ", str(result.different)],
        ["honest requests that a limit refused", str(result.busy)],
        ["/health idle, worst ms", f"{idle[-1] * 1e3:.0f}"],
        ["/health under load, median ms", f"{result.health[len(result.health) // 2] * 1e3:.0f}"],
        ["/health under load, worst ms", f"{result.health[-1] * 1e3:.0f}"],
        ["memory before, MiB", f"{result.before / 2**20:.0f}"],
        ["memory at most, MiB", f"{result.peak / 2**20:.0f}"],
        ["memory after, MiB", f"{result.after / 2**20:.0f}"],
        ["growth, MiB", f"{growth / 2**20:.0f}"],
    ]
    return table(["mixed load", ""], rows)


def main() -> None:
    """Print the tables."""
    parser = command_line("tests.security.attacks", __doc__)
    parser.add_argument("--only", choices=("routes", "attacks", "mixed"))
    parser.add_argument("--senders", type=int, default=2, help="clients that attack together")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each attack")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the mixed load")
    values = parser.parse_args()
    print(f"{cpu_name()}, {cores()} cores, {values.senders} clients attack together\n")
    with running() as client:
        if values.only in (None, "routes"):
            print(routes(client), "\n", flush=True)
        if values.only in (None, "attacks"):
            print(latencies(client, values.seconds, values.senders), "\n", flush=True)
    if values.only in (None, "mixed"):
        with running() as client:  # the memory of a new process
            print(mixed(client, values.seconds, values.requests))


if __name__ == "__main__":
    main()
