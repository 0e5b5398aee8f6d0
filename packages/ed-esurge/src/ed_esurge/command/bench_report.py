"""Figures of a load test: those of `vllm bench serve`, their table, and the comparison of two."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.command.bench import RequestTiming

#: Name of a latency -> (its name in vLLM's table, its title).
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
#: Latencies that objectives of goodput may limit.
OBJECTIVES = ("ttft", "tpot", "e2el")
# Key of a result -> (its name in vLLM's table, number of decimals); None: omitted without a value.
_LINES = {
    "completed": ("Successful requests", 0),
    "failed": ("Failed requests", 0),
    "max_concurrency": ("Maximum request concurrency", 0),
    "request_rate": ("Request rate configured (RPS)", 2),
    "duration": ("Benchmark duration (s)", 2),
    "total_input_tokens": ("Total input tokens", 0),
    "total_output_tokens": ("Total generated tokens", 0),
    "request_throughput": ("Request throughput (req/s)", 2),
    "request_goodput": ("Request goodput (req/s)", 2),
    "output_throughput": ("Output token throughput (tok/s)", 2),
    "max_output_tokens_per_s": ("Peak output token throughput (tok/s)", 2),
    "max_concurrent_requests": ("Peak concurrent requests", 2),
    "total_token_throughput": ("Total token throughput (tok/s)", 2),
}
WIDTH = 50
#: Results for which a smaller number is better.
_LOWER = ("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms")


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Return latency -> limit in milliseconds of objectives such as `ttft:200`.

    Raises:
        ConfigError: an objective has another form.
    """
    objectives: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = -1.0
        if name not in OBJECTIVES or not objectives[name] > 0:
            raise ConfigError(
                f"--goodput {text!r} is invalid: write LATENCY:MILLISECONDS, with a latency of "
                f"{', '.join(OBJECTIVES)}"
            )
    return objectives


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile with linear interpolation, as `numpy.percentile`; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def compute_metrics(
    answers: Sequence[RequestTiming],
    seconds: float,
    *,
    objectives: Mapping[str, float],
    percentiles: Sequence[float] = (99,),
) -> dict[str, Any]:
    """Return the figures of a load test, with the keys of vLLM's result files.

    Args:
        seconds: duration of the test.
        objectives: limits in milliseconds; a request that fulfills all counts for the goodput.

    Raises:
        EasyDeLError: all requests failed.
    """
    good = [answer for answer in answers if answer.error is None and answer.arrivals]
    if not good:
        raise EasyDeLError(f"no request was answered; the first failed so: {answers[0].error}")
    times: dict[str, list[float]] = {name: [] for name in LATENCIES}
    fulfilled = 0
    for answer in good:
        latencies = _latencies(answer)
        times["itl"] += [1000 * (b - a) for a, b in pairwise(answer.arrivals)]
        for name, value in latencies.items():
            times[name].append(value)
        fulfilled += all(latencies.get(name, 0.0) <= limit for name, limit in objectives.items())
    inputs = sum(answer.prompt_tokens for answer in good)
    outputs = sum(_tokens(answer) for answer in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": fulfilled / seconds if objectives else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    for name, values in times.items():
        result[f"mean_{name}_ms"] = statistics.fmean(values) if values else 0.0
        result[f"median_{name}_ms"] = percentile(values, 50)
        result[f"std_{name}_ms"] = statistics.pstdev(values) if values else 0.0
        for share in percentiles:
            result[f"p{share:g}_{name}_ms"] = percentile(values, share)
    return result


def _tokens(answer: RequestTiming) -> int:
    return answer.tokens or len(answer.arrivals)


def _latencies(answer: RequestTiming) -> dict[str, float]:
    """Return the latencies of one request in milliseconds. One token has no time per token."""
    first, last = answer.arrivals[0], answer.arrivals[-1]
    latencies = {"ttft": first - answer.began, "e2el": last - answer.began}
    if _tokens(answer) > 1:
        latencies["tpot"] = (last - first) / (_tokens(answer) - 1)
    return {name: 1000 * value for name, value in latencies.items()}


def _peaks(answers: Sequence[RequestTiming]) -> tuple[float, int]:
    """Return the largest number of tokens in a second, and of concurrent requests in a second."""
    start = min(answer.began for answer in answers)
    tokens: dict[int, float] = {}
    running: dict[int, int] = {}
    for answer in answers:
        share = _tokens(answer) / len(answer.arrivals)
        for arrival in answer.arrivals:
            second = int(arrival - start)
            tokens[second] = tokens.get(second, 0.0) + share
        for second in range(int(answer.began - start), int(answer.arrivals[-1] - start) + 1):
            running[second] = running.get(second, 0) + 1
    return max(tokens.values()), max(running.values())


def table(result: Mapping[str, Any], percentiles: Sequence[float] = (99,)) -> str:
    """Return the table of `vllm bench serve`."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def line(name: str, value: float, decimals: int) -> None:
        lines.append(f"{name + ':':<40} {value:<10.{decimals}f}".rstrip())

    for key, (name, decimals) in _LINES.items():
        if result.get(key) is not None:
            line(name, float(result[key]), decimals)
    for name, (short, title) in LATENCIES.items():
        lines.append(f"{title:-^{WIDTH}}")
        for label, key in (("Mean", "mean"), ("Median", "median")):
            line(f"{label} {short} (ms)", result[f"{key}_{name}_ms"], 2)
        for share in percentiles:
            line(f"P{share:g} {short} (ms)", result[f"p{share:g}_{name}_ms"], 2)
    return "\n".join([*lines, "=" * WIDTH])


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a saved result, of this command or of vLLM.

    Raises:
        ConfigError: the file is not a result.
    """
    try:
        result = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the result {path} cannot be read: {error}") from error
    if not isinstance(result, dict) or "request_throughput" not in result:
        raise ConfigError(f"{path} is not a result of a load test: it has no request_throughput")
    return result


def comparison(old_result: Mapping[str, Any], new_result: Mapping[str, Any]) -> str:
    """Return a table of the figures of two results, with the change in percent."""
    lines = [f"{'':<30} {'before':>12} {'after':>12} {'change':>9}"]
    for key, old in old_result.items():
        new = new_result.get(key)
        if not (_is_figure(old) and _is_figure(new)) or key.startswith("std_"):
            continue
        change = "" if not old else f"{100 * (new - old) / old:+.1f} %"
        better = ""
        lower = key.endswith(_LOWER) or key == "failed"
        if "throughput" in key or "goodput" in key or lower:
            better = " better" if (new < old if lower else new > old) else ""
            better = " worse" if not better and new != old else better
        lines.append(f"{key:<30} {old:>12.2f} {new:>12.2f} {change:>9}{better}")
    return "\n".join(lines)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
