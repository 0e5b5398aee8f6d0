"""The client of `tools.bench.serve` reads streams correctly, and the engine benchmark runs."""

from __future__ import annotations

import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

from tools.bench import engine, sse


def test_stream_reader_measures_arrival_of_text() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    blocks = [
        (0.5, head + b'data: {"choices":[{"text":""}]}\n\n'),
        (1.0, b'data: {"choices":[{"text":"a"}]}\n\n'),
        (1.5, b'data: {"choices":[{"text": "b"}]}\n\ndata: {"choices":[{"text":"c"}]}\n\n'),
        (3.0, b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\ndata: [DONE]\n\n'),
    ]
    assert sse.read(blocks) == sse.Answer(1.0, [0.5], 4)
    assert sse.read(blocks[:-1]).tokens == 3  # a server that does not count
    load = sse.Load(2.0, [sse.Answer(1.0, [0.5, 0.1], 4), sse.Answer(2.0, [0.2], 4)])
    assert load.tokens_per_second == 4
    assert [load.percentile("first", share) for share in (50, 95)] == [1000, 2000]
    assert [load.percentile("between", share) for share in (50, 95)] == [200, 500]
    for wrong in (b"HTTP/1.1 503 Down\r\n\r\n", head, head + b'data: {"error": {}}\n\n'):
        with pytest.raises(RuntimeError):
            sse.read([(0.1, wrong)])


def test_serve_benchmark_load_reads_whole_streams() -> None:
    with background(ScriptedEngine(lambda prompt, choice: "eight letters")) as url:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [{"prompt": "ab", "max_tokens": 8, **options} for _ in range(4)]
        load = sse.load(url, bodies, 2)
        assert [answer.tokens for answer in load.answers] == [8] * 4
        with pytest.raises(RuntimeError, match="max_tokens"):
            sse.load(url, [{**bodies[0], "max_tokens": -1}], 1)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_engine_benchmark_runs() -> None:
    """Run on two layers; the figures need an otherwise idle machine."""
    words = "--python 2 --sequences 2 --tokens 8 --layers 2 --rounds 1"
    options = engine.create_parser().parse_args(words.split())
    for name, measure in engine.MEASURES.items():
        rows = measure(options)
        assert {len(row) for row in rows} == {len(engine.HEADERS[name])}
