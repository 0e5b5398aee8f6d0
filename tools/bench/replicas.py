"""Measure two replicas in processes against one process: throughput, latency and prefix hits.

    uv run python -m tools.bench.replicas
    uv run python -m tools.bench.replicas --replicas 1 2 4 --seconds 30

Each server has the shape of SmolLM2-135M with random weights in float32. Streaming clients send
prompts of 256 tokens that share one of eight heads of 192 tokens, and read 32 tokens. The first
third of the time is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tools.bench.measure import command_line, machine

HEADS, HEAD, PROMPT, ANSWER = 8, 192, 256, 32
FLAGS = """--port 0 --max-model-len 320 --max-num-seqs 16 --page-size 16 --log-level warning
--silent-mode --no-compile-in-background"""


def save_model(folder: Path) -> None:
    """Save a model with the shape of SmolLM2-135M and a tokenizer of bytes."""
    from ed_esurge.testing import byte_tokenizer
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


async def load(url: str, clients: int, seconds: float) -> dict[str, float]:
    """Return tokens and requests per second, and the median time to the first token."""
    draw = random.Random(0)
    heads = [[draw.randrange(3, 256) for _ in range(HEAD)] for _ in range(HEADS)]
    began = time.monotonic()
    counted, end = began + seconds / 3, began + seconds
    tokens = 0
    first_times: list[float] = []

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal tokens
        while time.monotonic() < end:
            tail = [draw.randrange(3, 256) for _ in range(PROMPT - HEAD)]
            body = {
                "prompt": [*draw.choice(heads), *tail],
                "max_tokens": ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            sent, known = time.monotonic(), 0
            async with http.stream("POST", "completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now, event = time.monotonic(), json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    new = event["usage"]["completion_tokens"]
                    if counted <= now < end:
                        tokens += new - known
                        if not known and new:
                            first_times.append(now - sent)
                    known = new

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    span = end - counted
    return {
        "tokens/s": tokens / span,
        "requests/s": len(first_times) / span,
        "first token, median s": statistics.median(first_times),
    }


def hits(url: str) -> float:
    """Return the fraction of prompt tokens that were found in prefix caches."""
    text = httpx.get(url.replace("/v1", "/metrics"), timeout=60).text

    def total(name: str) -> float:
        return sum(map(float, re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.MULTILINE)))

    return total("prefix_cache_hits") / max(total("prefix_cache_queries"), 1)


def measure(folder: Path, replicas: int, clients: int, seconds: float) -> dict[str, float]:
    """Start a server, put load on it, and return the figures."""
    flags = [*FLAGS.split(), "--data-parallel-size", str(replicas)]
    words = [sys.executable, "-m", "ed_esurge", "serve", str(folder), *flags]
    began = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the server ended")
            found = re.match(r"serving at (\S+)", line)
        ready = time.monotonic() - began
        row: dict[str, Any] = {"ready s": ready, **asyncio.run(load(found[1], clients, seconds))}
        time.sleep(1)  # replicas report their statistics twice a second
        return {**row, "prefix hits": hits(found[1])}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print a table."""
    parser = command_line("replicas", __doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="numbers")
    parser.add_argument("--clients", type=int, default=16, help="streaming clients")
    parser.add_argument("--seconds", type=float, default=45, help="duration of the load")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        save_model(folder)
        titled = False
        for count in options.replicas:
            row = measure(folder, count, options.clients, options.seconds)
            if not titled:
                print("| replicas |", " | ".join(row), "|\n| ---: |", "---: | " * len(row))
                titled = True
            print(f"| {count} |", " | ".join(f"{v:.2f}" for v in row.values()), "|", flush=True)


if __name__ == "__main__":
    main()
