"""Load test with arrival times and data sets, with the figures of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shlex
import time
from typing import Annotated, Any

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import Field

from ed_esurge.command.bench import (
    MeasuredModel,
    RequestTiming,
    ServeFlags,
    ServerUrl,
    open_client,
    start_server,
    time_request,
)
from ed_esurge.command.bench_data import DatasetOptions, LoadRequest, build_requests
from ed_esurge.command.bench_report import (
    comparison,
    compute_metrics,
    parse_objectives,
    read_result,
    table,
)
from ed_esurge.command.flags import Flags
from ed_esurge.command.program import Result, show_result

MAX_PERCENTILES = 16


class ArrivalOptions(Options):
    """The arrival of requests."""

    request_rate: Annotated[float, Field(allow_inf_nan=True)] = math.inf
    """Mean number of requests per second; default: all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps; 1 = Poisson, below 1 = bursts."""
    max_concurrency: int | None = None
    """Limit of concurrent requests."""
    temperature: float = 0.0
    """Sampling temperature; 0: the most probable tokens."""
    seed: int = 0
    """Seed of the prompts and their arrivals."""
    num_warmups: int = 1
    """Number of requests before the test."""
    served_model_name: str | None = None
    """Model of the requests; default: the first of the server."""


class FigureOptions(Options):
    """The figures of a load test."""

    goodput: tuple[str, ...] = ()
    """Objectives of a request, a latency and milliseconds: ttft:200 tpot:50 e2el:2000."""
    metric_percentiles: str = "99"
    """Percentiles of the latencies, with commas."""
    save_result: str | None = None
    """File for the figures as JSON."""
    save_detailed: bool = False
    """Whether the file contains the times of each request."""
    compare: tuple[str, str] | None = None
    """Compare two saved results: BEFORE AFTER."""


def bench_serve(
    load: Annotated[ArrivalOptions, Flags("load")],
    data: Annotated[DatasetOptions, Flags("data")],
    figures: Annotated[FigureOptions, Flags("figures")],
    model: MeasuredModel = None,
    url: ServerUrl = None,
    serve_flags: ServeFlags = "",
) -> Result:
    """Put load on a server, with arrival times, data sets and figures of `vllm bench serve`.

    \b
    esurge bench serve MODEL --request-rate 4 --goodput ttft:500 tpot:50
    esurge bench serve --url http://host:8000/v1 --dataset-name sharegpt --dataset-path FILE
    esurge bench serve --compare BEFORE.json AFTER.json

    Requests are streamed completions. With --request-rate, they arrive as a Poisson process.
    """
    if figures.compare:
        before, after = map(read_result, figures.compare)
        show_result(comparison(before, after))
        return Result({"before": before, "after": after})
    if (model is None) == (url is None):
        raise ConfigError("give a MODEL to serve, or the --url of a server that runs")
    objectives = parse_objectives(figures.goodput)
    percentiles = _percentiles(figures.metric_percentiles)
    if not (load.request_rate > 0 and load.burstiness > 0):
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if load.max_concurrency is not None and load.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {load.max_concurrency} must be at least 1")
    requests = build_requests(data, load.seed)
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(start_server(model or "", shlex.split(serve_flags)))
        name, answers, seconds = asyncio.run(run_load_test(url.rstrip("/"), load, requests))
    endless = not math.isfinite(load.request_rate)
    result = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai",
        "model_id": name,
        "num_prompts": len(requests),
        "request_rate": "inf" if endless else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "dataset_name": data.dataset_name,
        **compute_metrics(answers, seconds, objectives=objectives, percentiles=percentiles),
    }
    if figures.save_result:
        _save(figures.save_result, result, answers if figures.save_detailed else None)
    show_result(table({**result, "request_rate": None} if endless else result, percentiles))
    return Result(result)


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = []
    if not 0 < len(percentiles) <= MAX_PERCENTILES or not all(
        0 < share <= 100 for share in percentiles
    ):
        raise ConfigError(
            f"--metric-percentiles {text!r} must be 1 to {MAX_PERCENTILES} "
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
    url: str, load: ArrivalOptions, requests: list[LoadRequest]
) -> tuple[str, list[RequestTiming], float]:
    """Send the requests. Return the model, the measurements and the seconds of the test.

    Raises:
        ConfigError: the server does not answer.
    """
    import httpx

    async with open_client() as client:
        model = load.served_model_name
        try:
            if model is None:
                models = (await client.get(f"{url}/models")).raise_for_status().json()
                model = models["data"][0]["id"]
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"{url}/models cannot be read: {error}") from error
        places = asyncio.Semaphore(load.max_concurrency or len(requests))

        async def one(request: LoadRequest) -> RequestTiming:
            body = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.output_len,
                "temperature": load.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with places:
                return await time_request(client, url, body)

        for request in requests[: max(load.num_warmups, 0)]:
            await one(request)
        draw = random.Random(load.seed)
        began = time.perf_counter()
        running = []
        due = began
        waits = gaps(draw, load.request_rate, load.burstiness, len(requests))
        for request, gap in zip(requests, waits, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()) if gap else 0)
            running.append(asyncio.create_task(one(request)))
        answers = await asyncio.gather(*running)
        return model, answers, time.perf_counter() - began
