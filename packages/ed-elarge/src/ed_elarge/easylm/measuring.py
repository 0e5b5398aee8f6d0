"""EasyLM's commands that measure: attention, and benchmarks of a served model."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from ed_infra.errors import ConfigError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from ed_elarge.easylm.flags import FlagValues, need
from ed_elarge.easylm.json_evaluation import evaluate_files


def benchmark_attention(flags: FlagValues) -> None:
    """Print the seconds of full and of blockwise attention, forward and backward.

    Raises:
        ConfigError: A number is not positive, or the width does not divide into the heads.
    """
    import jax

    from ed_elarge.easylm.blockwise import blockwise_attn
    from ed_elarge.easylm.checkpoints import float_dtype

    for name, value in flags.items():
        if isinstance(value, int) and value < (name in ("seed", "warmup_steps")) * -1 + 1:
            raise ConfigError(f"--{name}={value} must be positive")
    if flags["embed_dim"] % flags["n_heads"]:
        raise ConfigError(
            f"--embed_dim={flags['embed_dim']} must be a multiple of --n_heads={flags['n_heads']}"
        )
    dtype = float_dtype(flags["dtype"])
    heads, width = flags["n_heads"], flags["embed_dim"] // flags["n_heads"]

    def arrays(length: int) -> list[jax.Array]:
        shape = (flags["batch_size"], length, heads, width)
        keys = jax.random.split(jax.random.key(flags["seed"]), 3)
        return [jax.random.normal(key, shape, dtype) for key in keys]

    def measure(length: int, chunks: tuple[int, int] | None) -> float:
        def mean(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            query, key = chunks or (None, None)
            return blockwise_attn(q, k, v, query_chunk_size=query, key_chunk_size=key).mean()

        step = jax.jit(jax.grad(mean, argnums=(0, 1, 2)))
        inputs = arrays(length)
        for _ in range(flags["warmup_steps"] + 1):
            jax.block_until_ready(step(*inputs))
        began = time.perf_counter()
        for _ in range(flags["steps"]):
            jax.block_until_ready(step(*inputs))
        return time.perf_counter() - began

    short, long = flags["ref_attn_seq_len"], flags["eff_attn_seq_len"]
    chunks = flags["query_chunk_size"], flags["key_chunk_size"]
    full = measure(short, None)
    print(f"Reference attention: {full:.3f} seconds")
    blocks = measure(long, chunks)
    print(f"Efficient attention: {blocks:.3f} seconds")
    print(f"Efficiency: {full / blocks * (long / short) ** 2:.3f}")


class ServedLM(LM):
    """A model of lm-evaluation-harness behind a server with EasyLM's endpoints.

    Args:
        url: Address of the server.
        batch_size: Number of entries of one request.
    """

    def __init__(self, url: str, batch_size: int = 16) -> None:
        super().__init__()
        self._url, self._batch = url, batch_size

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Score continuations."""
        pairs: list[Any] = [one.args for one in requests]
        data = {"prefix": [pair[0] for pair in pairs], "text": [pair[1] for pair in pairs]}
        return self._scores("loglikelihood", data)

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Score whole texts."""
        texts = [one.args[0] for one in requests]
        return [score for score, _ in self._scores("loglikelihood_rolling", {"text": texts})]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Continue texts up to their stop strings."""
        prefix = [one.args[0] for one in requests]
        pairs: list[Any] = [one.args for one in requests]
        raw_stops = [pair[1].get("until", []) for pair in pairs]
        stops = [[stop] if isinstance(stop, str) else list(stop) for stop in raw_stops]
        data = {"prefix": prefix, "until": stops}
        return evaluate_files(data, "greedy_until", self._url, self._batch)["output_text"]

    def _scores(self, kind: str, data: dict[str, Any]) -> list[tuple[float, bool]]:
        out = evaluate_files(data, kind, self._url, self._batch)
        return list(zip(out["loglikelihood"], out["is_greedy"], strict=True))


def evaluate_tasks(flags: FlagValues) -> None:
    """Print the results of lm-evaluation-harness for a served model."""
    from lm_eval import simple_evaluate

    need(flags, "tasks")
    if flags["lm_client.wait_for_ready"]:
        wait_for_server(flags["lm_client.url"])
    run: Any = simple_evaluate  # a decorator hides its keywords from type checkers
    results = run(
        model=ServedLM(flags["lm_client.url"], flags["lm_client.batch_size"]),
        tasks=flags["tasks"].split(","),
        num_fewshot=flags["shots"],
        limit=flags["limit"] or None,
        log_samples=False,
    )
    print(json.dumps(results["results"], indent=2, default=str))


def wait_for_server(
    url: str, seconds: float = 600.0, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until `/ready` of a server answers.

    Raises:
        ConfigError: The server does not answer in this time.
    """
    address, end = f"{url.rstrip('/')}/ready", time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except (urllib.error.URLError, OSError, ValueError) as error:
            refused = isinstance(error, ValueError)  # no address of a server
            if refused or time.monotonic() >= end:
                raise ConfigError(f"{address} cannot be reached: {error}") from error
        sleep(1.0)
