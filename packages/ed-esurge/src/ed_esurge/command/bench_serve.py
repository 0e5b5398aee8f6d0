"""Load test with arrival times and data sets, with the figures of `vllm bench serve`.

    esurge bench serve MODEL --request-rate 4 --goodput ttft:500 tpot:50
    esurge bench serve --url http://host:8000/v1 --dataset-name sharegpt --dataset-path FILE
    esurge bench serve --compare BEFORE.json AFTER.json

Requests are streamed completions. With `--request-rate`, they arrive
as a Poisson process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import time
from typing import Any

import httpx
from ed_infra.errors import ConfigError

from ed_esurge.command.bench import RequestTiming, ask, start_server
from ed_esurge.command.bench_data import LoadRequest, add_dataset_arguments, build_requests
from ed_esurge.command.bench_report import (
    comparison,
    compute_metrics,
    parse_objectives,
    read_result,
    table,
)
from ed_esurge.command.serve import KEY

MAX_PERCENTILES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load test."""
    parser.add_argument("model", nargs="?", help="a directory, or a hub id, to serve meanwhile")
    parser.add_argument("--url", help="of a server that runs, with /v1")
    parser.add_argument("--served-model-name", help="model of the requests; default: the first")
    parser.add_argument(
        "--serve-flags", default="", help="flags of serve for MODEL, as one text in quotes"
    )
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        help="mean number of requests per second; default: all at once",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distribution of the gaps; 1 = Poisson, below 1 = bursts",
    )
    group.add_argument("--max-concurrency", type=int, help="limit of concurrent requests")
    group.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    group.add_argument("--seed", type=int, default=0, help="of the requests and their arrivals")
    group.add_argument("--num-warmups", type=int, default=1, help="default: %(default)s")
    add_dataset_arguments(parser)
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="LATENCY:MS",
        help="objectives of a request: ttft:200 tpot:50 e2el:2000",
    )
    group.add_argument("--metric-percentiles", default="99", help="default: %(default)s")
    group.add_argument("--save-result", metavar="FILE", help="write the figures as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="the file contains the times of each request"
    )
    group.add_argument("--json", action="store_true", help="print the figures as JSON")
    group.add_argument(
        "--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two saved results"
    )


def run(values: argparse.Namespace) -> int:
    """Run the load test and print its figures, or compare two results."""
    if values.compare:
        print(comparison(*map(read_result, values.compare)))
        return 0
    if (values.model is None) == (values.url is None):
        raise ConfigError("give a MODEL to serve, or the --url of a server that runs")
    objectives, percentiles = parse_objectives(values.goodput), _percentiles(values)
    if not (values.request_rate > 0 and values.burstiness > 0):
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if values.max_concurrency is not None and values.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {values.max_concurrency} must be at least 1")
    requests = build_requests(values)
    with contextlib.ExitStack() as stack:
        url = values.url or stack.enter_context(
            start_server(values.model, shlex.split(values.serve_flags))
        )
        model, answers, seconds = asyncio.run(run_load_test(url.rstrip("/"), values, requests))
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": model,
        "num_prompts": len(requests),
        "request_rate": values.request_rate if math.isfinite(values.request_rate) else "inf",
        "burstiness": values.burstiness,
        "max_concurrency": values.max_concurrency,
        "dataset_name": values.dataset_name,
        **compute_metrics(answers, seconds, objectives=objectives, percentiles=percentiles),
    }
    if values.save_result:
        _save(values.save_result, result, answers if values.save_detailed else None)
    endless = not math.isfinite(values.request_rate)
    printed_result = {**result, "request_rate": None} if endless else result
    print(json.dumps(result) if values.json else table(printed_result, percentiles), flush=True)
    return 0


def _percentiles(values: argparse.Namespace) -> list[float]:
    try:
        percentiles = [float(text) for text in values.metric_percentiles.split(",")]
    except ValueError:
        percentiles = []
    if not 0 < len(percentiles) <= MAX_PERCENTILES or not all(
        0 < share <= 100 for share in percentiles
    ):
        raise ConfigError(
            f"--metric-percentiles {values.metric_percentiles!r} must be 1 to {MAX_PERCENTILES} "
            "numbers above 0 and up to 100, with commas"
        )
    return percentiles


def _save(path: str, result: dict[str, Any], answers: list[RequestTiming] | None) -> None:
    if answers is not None:
        result = {
            **result,
            "input_lens": [one.prompt_tokens for one in answers],
            "output_lens": [one.tokens for one in answers],
            "ttfts": [one.arrivals[0] - one.began if one.arrivals else 0.0 for one in answers],
            "itls": [
                [b - a for a, b in zip(one.arrivals, one.arrivals[1:], strict=False)]
                for one in answers
            ],
            "latencies": [one.arrivals[-1] - one.began if one.arrivals else 0.0 for one in answers],
            "start_times": [one.began for one in answers],
            "errors": [one.error or "" for one in answers],
        }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file)
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error}") from error


def gaps(draw: random.Random, rate: float, burstiness: float, count: int) -> list[float]:
    """Return the seconds before each request; their mean is `1 / rate`."""
    if math.isinf(rate):
        return [0.0] * count
    scale = 1 / (rate * burstiness)
    return [draw.gammavariate(burstiness, scale) for _ in range(count)]


async def run_load_test(
    url: str, values: argparse.Namespace, requests: list[LoadRequest]
) -> tuple[str, list[RequestTiming], float]:
    """Send the requests. Return the model, the measurements and the seconds of the test.

    Raises:
        ConfigError: the server does not answer.
    """
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:
        model = values.served_model_name
        try:
            if model is None:
                models = (await client.get(f"{url}/models")).raise_for_status().json()
                model = models["data"][0]["id"]
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"{url}/models cannot be read: {error}") from error
        places = asyncio.Semaphore(values.max_concurrency or len(requests))

        async def one(request: LoadRequest) -> RequestTiming:
            body = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.output_len,
                "temperature": values.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with places:
                return await ask(client, url, body)

        for request in requests[: max(values.num_warmups, 0)]:
            await one(request)
        draw = random.Random(values.seed)
        began = time.perf_counter()
        running = []
        due = began
        waits = gaps(draw, values.request_rate, values.burstiness, len(requests))
        for request, gap in zip(requests, waits, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()) if gap else 0)
            running.append(asyncio.create_task(one(request)))
        answers = await asyncio.gather(*running)
        return model, answers, time.perf_counter() - began
