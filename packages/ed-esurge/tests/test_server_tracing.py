"""Spans of requests: with the SDK, and without it through a fake provider."""

from __future__ import annotations

import gzip
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import ClassVar

import httpx
import pytest
from ed_esurge.server import app as application
from ed_esurge.server.launch import background
from ed_esurge.server.tracing import provider_for
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError

trace = pytest.importorskip("opentelemetry.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sdk():
    """A provider of the SDK, and its spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter.get_finished_spans


def stand_in():
    """The part of the provider's interface that the server uses."""
    ended = []

    class Span(SimpleNamespace):
        def set_attribute(self, name, value):
            self.attributes[name] = value

        def set_status(self, status):
            self.status = status

        def end(self):
            ended.append(self)

    def start_span(name, context, kind, attributes):
        known = trace.get_current_span(context).get_span_context() if context else None
        status = SimpleNamespace(status_code=trace.StatusCode.UNSET)
        parent = known if known is not None and known.is_valid else None
        return Span(name=name, parent=parent, kind=kind, attributes=attributes, status=status)

    tracer = SimpleNamespace(start_span=start_span)
    provider = SimpleNamespace(get_tracer=lambda name: tracer, shutdown=lambda: None)
    return provider, lambda: ended


@pytest.fixture(params=["sdk", "stand-in"])
def spans(request, monkeypatch):
    if request.param == "sdk":
        pytest.importorskip("opentelemetry.sdk")
    provider, get = sdk() if request.param == "sdk" else stand_in()
    asked = []
    monkeypatch.setattr(application, "provider_for", lambda url: (asked.append(url), provider)[1])
    yield get
    assert asked == ["http://collector/v1/traces"]


def serve(engine):
    return background(engine, otlp_traces_endpoint="http://collector/v1/traces")


def test_each_prompt_has_one_trace_span(spans):
    engine = ScriptedEngine(lambda prompt, choice: "abc")
    with serve(engine) as url:
        body = {"prompt": ["a secret", "b"], "n": 2, "max_tokens": 2, "temperature": 0.5}
        headers = {"traceparent": PARENT}
        answer = httpx.post(f"{url}/completions", json=body, headers=headers).json()
        httpx.post(f"{url}/embeddings", json={"input": "a"})
    found = {span.attributes["gen_ai.request.id"]: dict(span.attributes) for span in spans()}
    assert len(found) == 3
    for place, tokens in enumerate((9, 2)):
        attributes = found[f"{answer['id']}-{place}"]
        latencies = [name for name in attributes if name.startswith("gen_ai.latency.")]
        assert {name.rpartition(".")[2] for name in latencies} == {
            "e2e",
            "time_in_queue",
            "time_to_first_token",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
        }
        assert all(attributes.pop(name) >= 0 for name in latencies)
        attributes["gen_ai.response.finish_reasons"] = [
            *attributes["gen_ai.response.finish_reasons"]
        ]
        assert attributes == {
            "gen_ai.provider.name": "ed-esurge",
            "gen_ai.request.id": f"{answer['id']}-{place}",
            "gen_ai.request.model": "scripted",
            "gen_ai.response.model": "scripted",
            "gen_ai.request.n": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": 2,
            "gen_ai.response.finish_reasons": ["length", "length"],
            "gen_ai.usage.prompt_tokens": tokens,
            "gen_ai.usage.input_tokens": tokens,
            "gen_ai.usage.completion_tokens": 4,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.cache_read.input_tokens": 0,
        }
    parents = [span.parent and f"{span.parent.trace_id:x}" for span in spans()]
    assert sorted(map(str, parents)) == ["None", *["af7651916cd43dd8448eb211c80319c"] * 2]
    assert {span.name for span in spans()} == {"llm_request"}
    assert "secret" not in str([dict(span.attributes) for span in spans()])


def test_disconnected_client_ends_the_trace_span(spans):
    engine = ScriptedEngine(lambda prompt, choice: "x" * 200, delay=0.02)
    with serve(engine) as url:
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body) as answer:
            next(answer.iter_lines())
        end = time.monotonic() + 60
        while not spans():
            assert time.monotonic() < end
            time.sleep(0.01)
    (span,) = spans()
    assert span.status.status_code == trace.StatusCode.ERROR
    assert list(span.attributes["gen_ai.response.finish_reasons"]) == ["abort"]
    assert 0 < span.attributes["gen_ai.usage.completion_tokens"] < 200


class Collector(BaseHTTPRequestHandler):
    """Receives the data of an exporter."""

    bodies: ClassVar[list[bytes]] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        packed = self.headers.get("content-encoding") == "gzip"
        self.bodies.append(gzip.decompress(body) if packed else body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        pass


def test_collector_receives_the_trace_spans():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    Collector.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        engine = ScriptedEngine(lambda prompt, choice: "abc")
        with background(engine, otlp_traces_endpoint=endpoint) as url:
            body = {"prompt": "a secret", "max_tokens": 2}
            answer = httpx.post(f"{url}/completions", json=body, headers={"traceparent": PARENT})
        collector.shutdown()
    (sent,) = [ExportTraceServiceRequest.FromString(body) for body in Collector.bodies]
    (of_service,) = sent.resource_spans
    names = {a.key: a.value.string_value for a in of_service.resource.attributes}
    assert names["service.name"] == "ed-esurge"
    (span,) = of_service.scope_spans[0].spans
    attributes = {a.key: a.value for a in span.attributes}
    assert span.name == "llm_request"
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    assert attributes["gen_ai.request.id"].string_value == f"{answer.json()['id']}-0"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2
    assert b"secret" not in Collector.bodies[0]


def test_tracing_without_otel_extra_raises_config_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"ed-esurge\[otel\]"):
        provider_for("http://127.0.0.1:1/v1/traces")
