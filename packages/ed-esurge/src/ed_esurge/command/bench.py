"""Load test of a server: throughput, time to the first token, time between tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.options import Options

from ed_esurge.command.bench_data import WORDS
from ed_esurge.command.flags import Flags
from ed_esurge.command.program import Result, show_result
from ed_esurge.command.serve import KEY

if TYPE_CHECKING:
    import httpx

_PERCENTILES = (50, 90, 99)


@dataclass
class RequestTiming:
    """Measurements of one request.

    Attributes:
        began: start time in seconds.
        arrivals: arrival times of the pieces with text.
        prompt_tokens, tokens: token counts of the server; the number of pieces without them.
        error: error message of a failed request.
    """

    began: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None


class ClientOptions(Options):
    """The load of a number of clients."""

    clients: tuple[int, ...] = (1, 8, 32)
    """Numbers of concurrent clients."""
    requests: int = 64
    """Requests for each number of clients."""
    prompt_words: int = 128
    """Words of a prompt."""
    max_tokens: int = 64
    """Maximum number of tokens of an answer."""
    temperature: float = 0.0
    """Sampling temperature; 0: the most probable tokens."""
    seed: int = 0
    """Seed of the prompts."""


MeasuredModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A directory, or a hub id, to serve meanwhile."),
]
ServerUrl = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="URL of a server that runs, with /v1.")
]
ServeFlags = Annotated[
    str, typer.Option(metavar="FLAGS", help="Flags of serve for MODEL, as one text in quotes.")
]


def bench(
    options: Annotated[ClientOptions, Flags("load")],
    model: MeasuredModel = None,
    url: ServerUrl = None,
    serve_flags: ServeFlags = "",
) -> Result:
    """Put load on a server: throughput, time to the first token, time between tokens.

    \b
    esurge bench MODEL                        serves the model during the test
    esurge bench --url http://host:8000/v1    any OpenAI-compatible server
    esurge bench MODEL --clients 1 8 32 --requests 64 --prompt-words 200

    Each client sends streamed completion requests one after another and reads each to the end.
    Prompts are random words from a seed, so that every server receives the same prompts.
    """
    if (model is None) == (url is None):
        raise ConfigError("give a MODEL to serve, or the --url of a server that runs")
    if min(*options.clients, options.requests, options.max_tokens, options.prompt_words) < 1:
        raise ConfigError("clients, requests, prompt words and tokens are at least 1")
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(start_server(model or "", shlex.split(serve_flags)))
        rows = asyncio.run(measure_server(url.rstrip("/"), options))
    show_result("\n".join(map(format_row, rows)))
    return Result({"rows": rows})


@contextlib.contextmanager
def start_server(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Start a server in a child process, yield its URL, and stop the server at exit.

    Raises:
        EasyDeLError: the server does not start.
    """
    command = [sys.executable, "-m", "ed_esurge", "serve", model, "--port", "0", *flags]
    quiet = ["--log-level", "warning"]
    process = subprocess.Popen([*command, *quiet], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.match(r"serving at (\S+)", line)
            if match:
                break
        else:
            raise EasyDeLError("the server did not start; the lines above state the reason")
        yield match[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def open_client() -> httpx.AsyncClient:
    """Return a client without limits, with the key of the variable."""
    import httpx

    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(headers=headers, timeout=None, limits=limits)


async def measure_server(url: str, options: ClientOptions) -> list[dict[str, float]]:
    """Return the results for each number of clients."""
    import httpx

    async with open_client() as client:
        try:
            models = (await client.get(f"{url}/models")).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"{url}/models cannot be read: {error}") from error
        body = {
            "model": models["data"][0]["id"],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        draw = random.Random(options.seed)
        await measure_load(
            client, url, body, draw_prompts(draw, options.prompt_words, 2), 1
        )  # warm
        rows = []
        for clients in options.clients:
            texts = draw_prompts(draw, options.prompt_words, options.requests)
            began = time.perf_counter()
            answers = await measure_load(client, url, body, texts, clients)
            rows.append(compute_figures(clients, answers, time.perf_counter() - began))
        return rows


def draw_prompts(draw: random.Random, words: int, count: int) -> list[str]:
    """Return texts without common prefixes."""
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


async def measure_load(
    client: httpx.AsyncClient, url: str, body: dict[str, object], texts: list[str], clients: int
) -> list[RequestTiming]:
    """Request completions of texts with a limited number of concurrent requests."""
    waiting = iter(texts)
    answers: list[RequestTiming] = []

    async def one_client() -> None:
        for text in waiting:
            answers.append(await time_request(client, url, {**body, "prompt": text}))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return answers


async def time_request(
    client: httpx.AsyncClient, url: str, body: dict[str, object]
) -> RequestTiming:
    """Send one streamed completion request."""
    import httpx

    answer = RequestTiming(time.perf_counter())
    try:
        async with client.stream("POST", f"{url}/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line[6:]), answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def _take(chunk: dict[str, object], answer: RequestTiming) -> None:
    """Add a piece of a stream to the measurements."""
    if "error" in chunk:
        answer.error = str(chunk["error"])
    choices = chunk.get("choices")
    if isinstance(choices, list) and choices and choices[0].get("text"):
        answer.arrivals.append(time.perf_counter())
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]


def compute_figures(
    clients: int, answers: Sequence[RequestTiming], seconds: float
) -> dict[str, float]:
    """Return rates, and percentiles of latencies in milliseconds.

    Raises:
        EasyDeLError: all requests failed.
    """
    good = [a for a in answers if a.error is None and a.arrivals]
    if not good:
        raise EasyDeLError(f"no request was answered; the first failed so: {answers[0].error}")
    tokens = sum(a.tokens or len(a.arrivals) for a in good)
    first = [a.arrivals[0] - a.began for a in good]
    between = [b - a for answer in good for a, b in pairwise(answer.arrivals)]
    end_to_end_times = [a.arrivals[-1] - a.began for a in good]
    row: dict[str, float] = {
        "clients": clients,
        "requests": len(good),
        "errors": len(answers) - len(good),
        "prompt_tokens": sum(a.prompt_tokens for a in good) / len(good),
        "tokens": tokens / len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": tokens / seconds,
    }
    for name, values in (("ttft", first), ("itl", between), ("e2e", end_to_end_times)):
        for share in _PERCENTILES:
            row[f"{name}_p{share}_ms"] = 1000 * nearest_percentile(values, share)
    return row


def nearest_percentile(values: Sequence[float], share: int) -> float:
    """Return the nearest-rank percentile of values; 0 without values."""
    ordered = sorted(values)
    return ordered[max(-(-len(ordered) * share // 100) - 1, 0)] if ordered else 0.0


def format_row(row: dict[str, float]) -> str:
    """Return a row of the table."""
    spans = []
    for label, name in (("first token", "ttft"), ("between", "itl"), ("whole", "e2e")):
        times = "/".join(format(row[f"{name}_p{share}_ms"], ".0f") for share in _PERCENTILES)
        spans.append(f"{label} {times} ms")
    return (
        f"{row['clients']:>4.0f} clients  {row['tokens_per_second']:8.1f} tokens/s  "
        f"{row['requests_per_second']:6.2f} requests/s  {'  '.join(spans)} (p50/p90/p99)"
        + (f"  {row['errors']:.0f} errors" if row["errors"] else "")
    )
