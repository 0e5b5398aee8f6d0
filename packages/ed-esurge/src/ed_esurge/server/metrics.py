"""Prometheus metrics of one application, with the names of vLLM for its dashboards.

Each application has its own registry, so that several applications can share a process.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as NameCounts
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from http import HTTPStatus
from itertools import accumulate
from typing import ClassVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ed_esurge.outputs import STEP_SIZES, RequestOutput
from ed_esurge.server.tracing import RequestSpan

_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
ReadStats = Callable[[], Sequence[Mapping[str, float]]]
#: Maximum number of adapters in one label of `vllm:lora_requests_info`.
MAX_LISTED_ADAPTERS = 64
_TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))


class ServerMetrics:
    """The metrics of one server.

    Attributes:
        engines: name of a model -> function that returns the statistics of its replicas; see
            `EngineCollector`.
        tokens: name of a model -> its token counts.
        settings: name of a model -> options of its engine about pages.
        adapters: name of a model -> its requests with adapters.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.engines: dict[str, ReadStats] = {}
        self.settings: dict[str, Mapping[str, object]] = {}
        self.adapters: dict[str, AdapterCounts] = {}
        self.registry.register(EngineCollector(self.engines))
        self.registry.register(InfoCollector(self.engines, self.settings, self.adapters))
        self.tokens: dict[str, TokenCounts] = {}
        self.registry.register(TokenCollector(self.tokens))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.batch_failures = counter(
            "esurge:batch_failures", "Failures of batches, including failed writes of files."
        )
        self.batches_stalled = Gauge(
            "esurge:batches_stalled",
            "1 while batches wait because their files cannot be written.",
            registry=self.registry,
        )

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        model = "model_name"
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.", model)
        self.audio_seconds = counter(
            "esurge:audio_seconds", "Seconds of transcribed recordings.", model
        )
        self.success = counter(
            "vllm:request_success", "Completions by how they ended.", model, "finished_reason"
        )
        self.histograms = {
            key: histogram(f"vllm:{name}", text, buckets, model)
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self.http_requests = counter(
            "http_requests",
            "HTTP requests by path, method and status.",
            *("handler", "method", "status"),
        )
        self.http_duration = histogram(
            "http_request_duration_seconds",
            "Time until the complete answer was sent.",
            _FIRST_TOKEN,
            *("handler", "method"),
        )

    def of(
        self,
        model_name: str,
        replica_stats: ReadStats,
        settings: Mapping[str, object] | None = None,
    ) -> ModelMetrics:
        """Return the metrics of one model.

        Args:
            settings: options of the engine about pages and adapters, by their names.
        """
        self.engines[model_name] = replica_stats
        self.settings[model_name] = settings or {}
        return ModelMetrics(self, model_name)

    def forget(self, model_name: str) -> None:
        """Stop reading the statistics of a model. Its counters remain."""
        self.engines.pop(model_name, None)
        self.settings.pop(model_name, None)

    def render(self) -> bytes:
        """Return the text for Prometheus."""
        return generate_latest(self.registry)


_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "first_token": (
        "time_to_first_token_seconds",
        "From arrival to the first token.",
        _FIRST_TOKEN,
    ),
    "whole": ("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS),
    "queue": ("request_queue_time_seconds", "From arrival to the first step.", _SECONDS),
    "prefill": (
        "request_prefill_time_seconds",
        "From the first step to the first token.",
        _SECONDS,
    ),
    "decode": (
        "request_decode_time_seconds",
        "From the first token to the last.",
        _SECONDS,
    ),
    "inference": (
        "request_inference_time_seconds",
        "From the first step to the last token.",
        _SECONDS,
    ),
    "per_token": (
        "request_time_per_output_token_seconds",
        "Mean time of a token after the first.",
        _BETWEEN_TOKENS,
    ),
    "n": ("request_params_n", "Completions that a request wants.", (1, 2, 5, 10, 20)),
    "max_tokens": ("request_params_max_tokens", "Tokens that a request allows.", _TOKENS),
    "per_prompt": ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    "per_generation": ("request_generation_tokens", "Tokens generated for a request.", _TOKENS),
}


class ModelMetrics:
    """The metrics of one model.

    Args:
        server: the metrics of the server.
        model_name: value of the label `model_name`.
    """

    def __init__(self, server: ServerMetrics, model_name: str) -> None:
        self.prompt_tokens = server.prompt_tokens.labels(model_name)
        self.audio_seconds = server.audio_seconds.labels(model_name)
        self.tokens = server.tokens.setdefault(model_name, TokenCounts())
        self.success = {
            reason: server.success.labels(model_name, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        bound = {key: one.labels(model_name) for key, one in server.histograms.items()}
        self.first_token = bound["first_token"]
        self.whole, self.queue = bound["whole"], bound["queue"]
        self.prefill, self.decode = bound["prefill"], bound["decode"]
        self.inference, self.per_token = bound["inference"], bound["per_token"]
        self.params_n, self.params_max_tokens = bound["n"], bound["max_tokens"]
        self.adapters = server.adapters.setdefault(model_name, AdapterCounts())
        self.per_prompt, self.per_generation = bound["per_prompt"], bound["per_generation"]

    def request(
        self,
        prompt_tokens: int,
        completions: int = 1,
        span: RequestSpan | None = None,
        *,
        max_tokens: int | None = None,
        adapter: str | None = None,
    ) -> RequestTimer:
        """Start the timer of a request. The timer also updates the span of the request.

        Args:
            max_tokens: limit of the tokens of a completion; None for requests without completions.
            adapter: name of the LoRA adapter.
        """
        if max_tokens is not None:
            self.params_n.observe(completions)
            self.params_max_tokens.observe(max_tokens)
        return RequestTimer(self, prompt_tokens, completions, span, adapter)


class RequestTimer:
    """Measures one request from its arrival to its end."""

    __slots__ = (
        *("_adapter", "_generated", "_last", "_lengths", "_metrics", "_open"),
        *("_prompt_tokens", "_span", "_start"),
    )

    def __init__(
        self,
        metrics: ModelMetrics,
        prompt_tokens: int,
        completions: int,
        span: RequestSpan | None,
        adapter: str | None,
    ) -> None:
        self._span = span
        self._adapter = adapter
        if adapter is not None:
            metrics.adapters.waiting[adapter] += 1
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._open = completions
        self._generated = 0
        self._lengths = [0] * completions
        self._start = time.monotonic()
        self._last: float | None = None

    def observe(self, delta: RequestOutput) -> None:
        """Record a delta of the engine."""
        metrics = self._metrics
        if self._span is not None:
            self._span.observe(delta)
        new = delta.num_tokens
        for out in delta.outputs:
            self._lengths[out.index] += len(out.token_ids)
            if out.finish_reason is not None:
                self._open -= 1
                metrics.success[out.finish_reason].inc()
        if new:
            now = time.monotonic()
            if self._last is None:
                if self._adapter is not None:
                    metrics.adapters.waiting -= NameCounts((self._adapter,))
                    metrics.adapters.running[self._adapter] += 1
                metrics.first_token.observe(now - self._start)
                metrics.prompt_tokens.inc(self._prompt_tokens)
            else:
                metrics.tokens.gap(now - self._last)
            self._last = now
            self._generated += new
            metrics.tokens.generated += new
        if delta.finished:
            self._record_finish(delta)

    def _record_finish(self, delta: RequestOutput) -> None:
        metrics, times = self._metrics, delta.metrics
        metrics.whole.observe(time.monotonic() - self._start)
        metrics.per_prompt.observe(self._prompt_tokens)
        metrics.per_generation.observe(self._generated)
        marks = (
            times.arrival_time,
            times.first_scheduled_time,
            times.first_token_time,
            times.last_token_time,
        )
        phases = (metrics.queue, metrics.prefill, metrics.decode)
        for phase, begin, end in zip(phases, marks, marks[1:], strict=False):
            if begin is not None and end is not None:
                phase.observe(end - begin)
        _, first_step, first, last = marks
        if first_step is not None and last is not None:
            metrics.inference.observe(last - first_step)
        longest = max(self._lengths, default=0)  # the completion with the last token
        if first is not None and last is not None and longest > 1:
            metrics.per_token.observe((last - first) / (longest - 1))

    def over(self) -> None:
        """End the request. Completions without a finish reason count as aborted."""
        if self._span is not None:
            self._span.end()
        if self._adapter is not None:
            counts, name = self._metrics.adapters, NameCounts((self._adapter,))
            if self._last is None:
                counts.waiting -= name
            else:
                counts.running -= name
            self._adapter = None
        if self._open > 0:
            self._metrics.success["abort"].inc(self._open)
            self._open = 0


class AdapterCounts:
    """The unfinished requests of each LoRA adapter, before and after their first token.

    Adapters without such requests have no entry, because clients choose the names of adapters.
    """

    def __init__(self) -> None:
        self.waiting: NameCounts[str] = NameCounts()
        self.running: NameCounts[str] = NameCounts()


class TokenCounts:
    """The counters that change with every token.

    Plain numbers are faster than a histogram of prometheus_client, which acquires locks and visits
    all buckets. Only the thread of the event loop changes the counters.

    Attributes:
        generated: number of tokens.
        gaps: number of times between outputs in each bucket; the last bucket has no upper bound.
        seconds: sum of these times.
    """

    __slots__ = ("gaps", "generated", "seconds")

    def __init__(self) -> None:
        self.generated, self.seconds = 0, 0.0
        self.gaps = [0] * (len(_BETWEEN_TOKENS) + 1)

    def gap(self, seconds: float) -> None:
        """Count the time between two outputs of a request."""
        self.gaps[bisect_left(_BETWEEN_TOKENS, seconds)] += 1
        self.seconds += seconds


class TokenCollector(Collector):
    """Exports the `TokenCounts` of each model."""

    def __init__(self, counts: Mapping[str, TokenCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name"]
        generated = CounterMetricFamily(
            "vllm:generation_tokens", "Tokens generated.", labels=labels
        )
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Time between two outputs of a request.",
            labels=labels,
        )
        bounds = [*map(floatToGoString, _BETWEEN_TOKENS), "+Inf"]
        for name, counts in self._counts.items():
            generated.add_metric([name], counts.generated)
            upto = accumulate(counts.gaps)
            gaps.add_metric([name], [*zip(bounds, upto, strict=True)], counts.seconds)
        yield from (generated, gaps)

    def describe(self) -> Iterable[Metric]:
        return []


#: vLLM's name of the counters of accepted tokens by position. Their statistics end with a position.
_ACCEPTED_BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos"


class EngineCollector(Collector):
    """Reads the statistics of the engines when Prometheus scrapes the server.

    The statistics of a replica are a mapping with `num_requests_running`, `num_requests_waiting`,
    `kv_cache_usage` (0 … 1), `prefix_cache_queries`, `prefix_cache_hits` (tokens),
    `num_preemptions`, `recompiles` (after the warmup) and `programs_pending`. Speculative decoding
    adds `spec_decode_num_drafts`, `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens`
    (also by `position`, as `spec_decode_num_accepted_tokens_per_pos`) and `spec_decode_num_pauses`.
    Pages in host memory add `external_prefix_cache_queries`, `external_prefix_cache_hits` (tokens),
    `kv_offload_store_bytes`, `kv_offload_load_bytes` and `kv_offload_cpu_cache_usage` (0 … 1).
    An encoder adds `mm_cache_queries`, `mm_cache_hits` (items), `encoder_cache_usage` (0 … 1),
    `encoder_cache_entries` and `encoder_cache_bytes`. Missing statistics are not exported. The
    label `engine` is the index of the replica.
    """

    # Name of a metric -> its text. The statistic has the same name, without prefix and `_perc`.
    _GAUGES: ClassVar[dict[str, str]] = {
        "vllm:num_requests_running": "Requests in the running batch.",
        "vllm:num_requests_waiting": "Requests waiting for pages.",
        "vllm:kv_cache_usage_perc": "Fraction of the pages in use, 0 to 1.",
        "vllm:kv_offload_cpu_cache_usage_perc": "Fraction of the host pages in use, 0 to 1.",
        "esurge:encoder_cache_usage_perc": "Fraction of the encoder's rows in use, 0 to 1.",
        "esurge:encoder_cache_entries": "Items, such as images, whose encoder outputs are cached.",
        "esurge:encoder_cache_bytes": "Bytes of the cached encoder outputs.",
        "esurge:programs_pending": "Programs that are compiled in the background.",
    }
    _COUNTERS: ClassVar[dict[str, str]] = {
        "vllm:prefix_cache_queries": "Prompt tokens looked up.",
        "vllm:prefix_cache_hits": "Prompt tokens found.",
        "vllm:external_prefix_cache_queries": "Prompt tokens looked up in host memory.",
        "vllm:external_prefix_cache_hits": "Prompt tokens found in host memory.",
        "vllm:kv_offload_store_bytes": "Bytes of pages copied to host memory.",
        "vllm:kv_offload_load_bytes": "Bytes of pages copied from host memory.",
        "vllm:mm_cache_queries": "Items of encoders looked up in the cache.",
        "vllm:mm_cache_hits": "Items of encoders found in the cache.",
        "vllm:num_preemptions": "Preemptions of requests.",
        "esurge:recompiles": "Functions compiled during requests.",
        "vllm:spec_decode_num_drafts": "Drafts of tokens.",
        "vllm:spec_decode_num_draft_tokens": "Tokens in drafts.",
        "vllm:spec_decode_num_accepted_tokens": "Draft tokens accepted by the model.",
        "esurge:spec_decode_num_pauses": "Requests whose drafts were switched off for a time.",
    }

    def __init__(self, engines: Mapping[str, ReadStats]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        stats = {name: read() for name, read in self._engines.items()}
        for texts, kind in (
            (self._GAUGES, GaugeMetricFamily),
            (self._COUNTERS, CounterMetricFamily),
        ):
            for name, text in texts.items():
                key = name.partition(":")[2].removesuffix("_perc")
                family = kind(name, text, labels=["model_name", "engine"])
                for model_name, replicas in stats.items():
                    for index, numbers in enumerate(replicas):
                        if key in numbers:
                            family.add_metric([model_name, str(index)], numbers[key])
                if family.samples:
                    yield family
        family = CounterMetricFamily(
            _ACCEPTED_BY_PLACE,
            "Accepted draft tokens by position in the draft.",
            labels=["model_name", "engine", "position"],
        )
        prefix = f"{_ACCEPTED_BY_PLACE.partition(':')[2]}_"
        for model_name, replicas in stats.items():
            for index, numbers in enumerate(replicas):
                for key in (key for key in numbers if key.startswith(prefix)):
                    labels = [model_name, str(index), key.removeprefix(prefix)]
                    family.add_metric(labels, numbers[key])
        if family.samples:
            yield family

    def describe(self) -> Iterable[Metric]:
        return []


class InfoCollector(Collector):
    """Exports settings as labels (the value is 1), adapters in use, and the tokens of steps.

    Args:
        engines, settings, adapters: see `ServerMetrics`.
    """

    def __init__(
        self,
        engines: Mapping[str, ReadStats],
        settings: Mapping[str, Mapping[str, object]],
        adapters: Mapping[str, AdapterCounts],
    ) -> None:
        self._engines, self._settings, self._adapters = engines, settings, adapters

    def collect(self) -> Iterable[Metric]:
        yield from self._steps()
        names = sorted(
            {key for settings in self._settings.values() for key in settings} - {"max_loras"}
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Options of the pages; the value is 1.",
            labels=["model_name", "engine", "num_gpu_blocks", *names],
        )
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters of unfinished requests; the value is the time in seconds since 1970.",
            labels=["model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        for model, settings in self._settings.items():
            for index, stats in enumerate(self._engines[model]()):
                pages = str(int(stats.get("num_pages", 0)))
                values = [str(settings.get(name, "")) for name in names]
                cache.add_metric([model, str(index), pages, *values], 1)
            if settings.get("max_loras"):
                counts = self._adapters.get(model, AdapterCounts())
                used = [
                    ",".join(nsmallest(MAX_LISTED_ADAPTERS, one))
                    for one in (counts.waiting, counts.running)
                ]
                adapters.add_metric([model, str(settings["max_loras"]), *used], time.time())
        yield from (family for family in (cache, adapters) if family.samples)

    def _steps(self) -> Iterable[Metric]:
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of a step of the engine.",
            labels=["model_name", "engine"],
        )
        keys = [*map(str, STEP_SIZES), "inf"]
        bounds = [*map(floatToGoString, STEP_SIZES), "+Inf"]
        for model, read in self._engines.items():
            for index, stats in enumerate(read()):
                if "iteration_tokens_sum" in stats:
                    upto = accumulate(stats[f"iteration_tokens_{key}"] for key in keys)
                    buckets = [*zip(bounds, upto, strict=True)]
                    total = stats["iteration_tokens_sum"]
                    tokens.add_metric([model, str(index)], buckets, total)
        if tokens.samples:
            yield tokens

    def describe(self) -> Iterable[Metric]:
        return []


# Values of the label `status`: the known ones, and "other".
_STATUSES = frozenset({*map(int, HTTPStatus), 499})


class HTTPMetrics:
    """ASGI middleware that counts requests and their durations. Streams end with the last byte.

    Every label value is of a closed set, because each combination of values needs memory until the
    end of the server, and clients choose paths and methods. A request without a route, or with a
    method that its route lacks, has the values "none".
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        start = time.monotonic()

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_record)
        finally:
            route = scope.get("route")
            handler, method = "none", "none"
            if route is not None and scope["method"] in route.methods:
                handler, method = route.path, scope["method"]
            status_label = str(status) if status in _STATUSES else "other"
            self.metrics.http_requests.labels(handler, method, status_label).inc()
            self.metrics.http_duration.labels(handler, method).observe(time.monotonic() - start)
