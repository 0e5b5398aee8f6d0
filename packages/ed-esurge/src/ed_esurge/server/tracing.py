"""OpenTelemetry spans of requests; requires the extra `ed-esurge[otel]`.

Each prompt has one span `llm_request`, with the attributes of vLLM and of the GenAI conventions
(https://opentelemetry.io/docs/specs/semconv/gen-ai). The header `traceparent` of the request sets
the parent of the span. Spans contain neither prompts nor answers.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from ed_infra.errors import ConfigError
from starlette.types import ASGIApp, Receive, Scope, Send

from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams

_MISSING = (
    "traces require opentelemetry: pip install 'ed-esurge[otel]', or omit otlp_traces_endpoint"
)
#: The trace context in the headers of the current request.
_parent: ContextVar[Any] = ContextVar("ed_esurge_trace_parent", default=None)


class TraceSpan(Protocol):
    """The part of an OpenTelemetry span that the server uses."""

    def set_attribute(self, key: str, value: str | float | list[str]) -> None: ...

    def set_status(self, status: object) -> None: ...

    def end(self) -> None: ...


class TracerProvider(Protocol):
    """The part of an OpenTelemetry tracer provider that the server uses."""

    def get_tracer(self, name: str, /) -> Any: ...

    def shutdown(self) -> None: ...


def provider_for(endpoint: str) -> TracerProvider:
    """Return a tracer provider that sends spans to a collector with OTLP over HTTP.

    Args:
        endpoint: URL such as `http://127.0.0.1:4318/v1/traces`.

    Raises:
        ConfigError: opentelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace import TracerProvider as SDKProvider  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"{_MISSING} ({error})") from None
    # The variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override the name.
    provider = SDKProvider(resource=Resource.create({"service.name": "ed-esurge"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Tracing:
    """Creates the spans of a server.

    Args:
        provider: an OpenTelemetry tracer provider.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("ed_esurge")

    def request(
        self,
        request_id: str,
        model: str,
        prompt_tokens: int,
        params: SamplingParams | PoolingParams,
    ) -> RequestSpan:
        """Start the span of a prompt."""
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "ed-esurge",
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        if isinstance(params, SamplingParams):
            attributes |= {
                "gen_ai.request.n": params.n,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
            }
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span = self._tracer.start_span(
            "llm_request", context=_parent.get(), kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestSpan(span)

    def shutdown(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one prompt."""

    def __init__(self, span: TraceSpan) -> None:
        self._span, self._reasons = span, {}
        self._generated = 0
        self._last: RequestOutput | None = None

    def observe(self, delta: RequestOutput) -> None:
        """Record a delta of the engine."""
        self._last = delta
        self._generated += delta.num_tokens
        for out in delta.outputs:
            if out.finish_reason is not None:
                self._reasons[out.index] = out.finish_reason

    def end(self) -> None:
        """End the span."""
        from opentelemetry.trace import Status, StatusCode

        span, last = self._span, self._last
        span.set_attribute("gen_ai.usage.completion_tokens", self._generated)
        span.set_attribute("gen_ai.usage.output_tokens", self._generated)
        if last is None or not last.finished:
            span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
            span.set_status(Status(StatusCode.ERROR, "the request was aborted"))
            span.end()
            return
        reasons = [self._reasons[index] for index in sorted(self._reasons)]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if "error" in reasons:
            span.set_status(Status(StatusCode.ERROR, last.error or "the engine failed"))
        times = last.metrics
        begin, scheduled = times.arrival_time, times.first_scheduled_time
        first, end = times.first_token_time, times.last_token_time
        for name, start, stop in (
            ("time_in_queue", begin, scheduled),
            ("time_to_first_token", begin, first),
            ("time_in_model_prefill", scheduled, first),
            ("time_in_model_decode", first, end),
            ("time_in_model_inference", scheduled, end),
            ("e2e", begin, end),
        ):
            if start is not None and stop is not None:
                span.set_attribute(f"gen_ai.latency.{name}", stop - start)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", times.num_cached_tokens)
        span.end()


class TraceContext:
    """ASGI middleware that reads the trace context from the headers of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            from opentelemetry.propagate import extract

            names = (b"traceparent", b"tracestate")
            carrier = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in names}
            _parent.set(extract(carrier) if carrier else None)
        await self.app(scope, receive, send)
