"""A line of the log every ten seconds while a server works: tokens per second, and queues."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ed_infra.logging import get_logger

from ed_esurge.server.metrics import ServerMetrics

logger = get_logger(__name__)
#: Seconds between two lines.
INTERVAL = 10.0
#: Paths that probes and scrapers call, whose successful requests are not in the log.
PROBES = frozenset(
    ("/health", "/health/live", "/health/ready", "/health/decode", "/ping", "/metrics", "/load")
)


class ProbeFilter(logging.Filter):
    """Omits successful requests of `PROBES` from uvicorn's log of requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the log contains a record."""
        values = record.args
        if not isinstance(values, tuple) or len(values) != 5:
            return True
        _, _, path, _, status = values
        is_probe = str(path).partition("?")[0] in PROBES
        return not (is_probe and isinstance(status, int) and status < 400)


@dataclass(frozen=True)
class _Counts:
    """Counts of a model since the start of the server."""

    prompt: float
    generated: int
    queries: float
    hits: float


class Throughput:
    """Describes the work of a server since the previous description.

    Args:
        metrics: the metrics of the server.
        clock: returns a time in seconds.
    """

    def __init__(self, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._time = clock()
        self._counts: dict[str, _Counts] = {}

    def describe(self) -> Iterator[str]:
        """Yield a line for each model that has worked, or that has requests."""
        now = self._clock()
        seconds, self._time = max(now - self._time, 1e-9), now
        prompts = {
            sample.labels["model_name"]: sample.value
            for metric in self._metrics.prompt_tokens.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
        for name, read_stats in list(self._metrics.engines.items()):
            replicas = list(read_stats())
            tokens = self._metrics.tokens.get(name)
            counts = _Counts(
                prompt=prompts.get(name, 0),
                generated=tokens.generated if tokens else 0,
                queries=_sum(replicas, "prefix_cache_queries"),
                hits=_sum(replicas, "prefix_cache_hits"),
            )
            before = self._counts.get(name, _Counts(0, 0, 0, 0))
            self._counts[name] = counts
            running = _sum(replicas, "num_requests_running")
            waiting = _sum(replicas, "num_requests_waiting")
            if counts == before and not (running or waiting):
                continue
            line = (
                f"{name}: {(counts.prompt - before.prompt) / seconds:.1f} prompt tokens/s, "
                f"{(counts.generated - before.generated) / seconds:.1f} generated tokens/s, "
                f"{running:.0f} running, {waiting:.0f} waiting"
            )
            if replicas and "kv_cache_usage" in replicas[0]:
                usage = _sum(replicas, "kv_cache_usage") / len(replicas)
                line += f", pages {usage:.1%} used"
            if counts.queries:
                line += f", prefix cache hits {counts.hits / counts.queries:.1%}"
            yield line


def _sum(replicas: list[Mapping[str, float]], name: str) -> float:
    return sum(one.get(name, 0) for one in replicas)


async def log_throughput(metrics: ServerMetrics) -> None:
    """Log a line for each busy model every `INTERVAL` seconds, until the task is cancelled."""
    throughput = Throughput(metrics)
    while True:
        await asyncio.sleep(INTERVAL)
        for line in throughput.describe():
            logger.info("%s", line)
