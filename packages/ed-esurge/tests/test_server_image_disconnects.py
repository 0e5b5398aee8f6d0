"""Clients that disconnect during requests with images leave nothing behind."""

from __future__ import annotations

import asyncio
import base64
import io
import resource
import time
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.server.launch import background

from tests.hostile_images import damaged
from tests.image_checkpoints import save_checkpoint

Image = pytest.importorskip("PIL.Image")

#: Number of requests that are open at the same time.
TOGETHER = 8


def part(data: bytes) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"},
    }


def picture(seed: int) -> bytes:
    rng, data = np.random.default_rng(seed), io.BytesIO()
    size = rng.integers(10, 80, 2)
    Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(data, "PNG")
    return data.getvalue()


class Clients:
    """Sends requests of which two thirds disconnect, and every twentieth has a damaged image."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model, self.hostile = url, model, [*damaged().values()]
        self.results: dict[str, int] = {}

    async def send(self, number: int, http: httpx.AsyncClient, free: asyncio.Semaphore) -> None:
        """Send a request, and count how it ended."""
        bad = number % 20 == 19
        images = [self.hostile[number // 20 % len(self.hostile)]] if bad else []
        if not bad:
            images = [picture(seed % 50) for seed in range(number, number + number % 3)]
        content = [*map(part, images), {"type": "text", "text": f"what {number % 90}?"}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 16,
            "stream": True,
            "ignore_eos": True,
        }
        async with free:
            try:
                ended = await asyncio.wait_for(self.read(number, http, body), self.limit(number))
            except TimeoutError:
                ended = "cut"
        self.results[ended] = self.results.get(ended, 0) + 1

    @staticmethod
    def limit(number: int) -> float:
        """Return the seconds after which a client disconnects."""
        return 0.002 * (number % 30) if number % 3 == 1 else 60.0

    async def read(self, number: int, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """Read an answer, or only its first line."""
        async with http.stream("POST", f"{self.url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            async for _ in answer.aiter_lines():
                if number % 3 == 0:
                    return "left"
        return "whole"

    async def run(self, first: int, last: int) -> None:
        """Send the requests of a range."""
        free = asyncio.Semaphore(TOGETHER)
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*(self.send(number, http, free) for number in range(first, last)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_2000_requests_with_disconnects_release_everything(tmp_path):
    save_checkpoint("internvl", tmp_path)
    flags = "--max-model-len 256 --max-num-seqs 4 --page-size 16 --silent-mode "
    flags += "--tensor-parallel-size 1 "
    flags += "--num-pages 40 --max-num-batched-tokens 64"
    engine = create_engine(parse_model_arguments([str(tmp_path), *flags.split()]))
    with background(engine) as url:
        clients, peaks = Clients(url, engine.model_name), []
        assert len(clients.hostile) > 50, "each is sent at least once"
        for first in range(0, 2000, 400):
            asyncio.run(clients.run(first, first + 400))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        deadline = time.monotonic() + 30
        while any(engine.stats()[f"num_requests_{state}"] for state in ("running", "waiting")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stats, encoder = engine.stats(), engine.loop.scheduler.encoder
    assert sum(clients.results.values()) == 2000
    assert all(clients.results[ended] > 90 for ended in ("whole", "left", "cut"))
    assert clients.results["400"] > 50 and set(clients.results) == {"whole", "left", "cut", "400"}
    assert stats["recompiles"] == 0
    assert (stats["kv_cache_usage"], encoder.usage) == (0, 0)
    assert peaks[-1] - peaks[1] < 64 * 1024, peaks  # kibibytes
