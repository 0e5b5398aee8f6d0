"""Load test of a server: throughput, time to the first token, time between tokens.

    python -m ed_esurge bench MODEL                        serves the model during the test
    python -m ed_esurge bench --url http://host:8000/v1    any OpenAI-compatible server
    python -m ed_esurge bench MODEL --clients 1 8 32 --requests 64 --prompt-words 200

Each client sends streamed completion requests one after another and reads each to the end. Prompts
are random words from a seed, so that every server receives the same prompts.
"""

from __future__ import annotations

import argparse
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

import httpx
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.command.bench_data import WORDS
from ed_esurge.command.serve import KEY

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load test."""
    parser.add_argument("model", nargs="?", help="a directory, or a hub id, to serve meanwhile")
    parser.add_argument("--url", help="of a server that runs, with /v1")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64, help="for each number of clients")
    parser.add_argument("--prompt-words", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true", help="print figures as JSON lines")
    parser.add_argument(
        "--serve-flags", default="", help="flags of serve for MODEL, as one text in quotes"
    )


def run(values: argparse.Namespace) -> int:
    """Run the load test and print a row for each number of clients."""
    if (values.model is None) == (values.url is None):
        raise ConfigError("give a MODEL to serve, or the --url of a server that runs")
    if min(*values.clients, values.requests, values.max_tokens, values.prompt_words) < 1:
        raise ConfigError("clients, requests, prompt words and tokens are at least 1")
    with contextlib.ExitStack() as stack:
        url = values.url or stack.enter_context(
            start_server(values.model, shlex.split(values.serve_flags))
        )
        for row in asyncio.run(measure(url.rstrip("/"), values)):
            print(json.dumps(row) if values.json else format_row(row), flush=True)
    return 0


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


async def measure(url: str, values: argparse.Namespace) -> list[dict[str, float]]:
    """Return the results for each number of clients."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
        try:
            models = (await client.get(f"{url}/models")).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"{url}/models cannot be read: {error}") from error
        body = {
            "model": models["data"][0]["id"],
            "max_tokens": values.max_tokens,
            "temperature": values.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        draw = random.Random(values.seed)
        await load(client, url, body, prompts(draw, values.prompt_words, 2), 1)  # warm
        rows = []
        for clients in values.clients:
            texts = prompts(draw, values.prompt_words, values.requests)
            began = time.perf_counter()
            answers = await load(client, url, body, texts, clients)
            rows.append(figures(clients, answers, time.perf_counter() - began))
        return rows


def prompts(draw: random.Random, words: int, count: int) -> list[str]:
    """Return texts without common prefixes."""
    return [" ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


async def load(
    client: httpx.AsyncClient, url: str, body: dict[str, object], texts: list[str], clients: int
) -> list[RequestTiming]:
    """Request completions of texts with a limited number of concurrent requests."""
    waiting = iter(texts)
    answers: list[RequestTiming] = []

    async def one_client() -> None:
        for text in waiting:
            answers.append(await ask(client, url, {**body, "prompt": text}))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return answers


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, object]) -> RequestTiming:
    """Send one streamed completion request."""
    answer = RequestTiming(time.perf_counter())
    try:
        async with client.stream("POST", f"{url}/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread())[:200]!r}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(json.loads(line[6:]), answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def take(chunk: dict[str, object], answer: RequestTiming) -> None:
    """Add a piece of a stream to the measurements."""
    if "error" in chunk:
        answer.error = str(chunk["error"])
    choices = chunk.get("choices")
    if isinstance(choices, list) and choices and choices[0].get("text"):
        answer.arrivals.append(time.perf_counter())
    usage = chunk.get("usage")
    if isinstance(usage, dict):
        answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]


def figures(clients: int, answers: Sequence[RequestTiming], seconds: float) -> dict[str, float]:
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
            row[f"{name}_p{share}_ms"] = 1000 * percentile(values, share)
    return row


def percentile(values: Sequence[float], share: int) -> float:
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
