"""A cheap client: streamed completions over plain sockets, with the arrival time of each piece.

Its cost is the same for every server and outside the server's process: `load` starts a separate
process.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

TEXT = re.compile(rb'"text":\s*"[^"]')
COUNTED = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass
class Answer:
    """One streamed completion.

    Attributes:
        first: Seconds from sending to the first piece of text.
        between: Seconds between pieces that arrived separately.
        tokens: Number of tokens as counted by the server; without a count, the number of pieces.
    """

    first: float = 0.0
    between: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Load:
    """The answers that some clients received.

    Attributes:
        seconds: Seconds from the first request to the last byte.
    """

    seconds: float
    answers: list[Answer]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def percentile(self, part: str, share: int) -> float:
        """Return the percentile of "first" or "between" in milliseconds; 0 without values."""
        if part == "first":
            values = sorted(answer.first for answer in self.answers)
        else:
            values = sorted(gap for answer in self.answers for gap in answer.between)
        return 1e3 * values[max(-(-len(values) * share // 100) - 1, 0)] if values else 0.0


def load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """Send completions to a server, `clients` at a time, from a separate process.

    Args:
        url: Base URL, including /v1.
        bodies: Bodies of `POST /v1/completions`, with `stream`.

    Raises:
        RuntimeError: A request was not answered.
    """
    asked = json.dumps({"url": url, "bodies": list(bodies), "clients": clients})
    command = [sys.executable, "-m", "tools.bench.sse"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{url}: {done.stderr[-1000:]}")
    got = json.loads(done.stdout)
    return Load(got["seconds"], [Answer(**answer) for answer in got["answers"]])


async def many(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """Send completions from this process; see `load`."""
    waiting, answers = iter(bodies), []

    async def one_client() -> None:
        for body in waiting:
            answers.append(await ask(url, body))

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    return Load(time.perf_counter() - began, answers)


async def ask(url: str, body: dict[str, Any]) -> Answer:
    """Send one completion, and read until the connection is closed."""
    parts, data = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = (
        f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    began = time.perf_counter()
    writer.write(head.encode() + data)
    blocks: list[tuple[float, bytes]] = []
    while block := await reader.read(1 << 16):
        blocks.append((time.perf_counter() - began, block))
    writer.close()
    return read(blocks)


def read(blocks: Sequence[tuple[float, bytes]]) -> Answer:
    """Return the completion in a response.

    Args:
        blocks: Arrival time in seconds and content of each received block.

    Raises:
        RuntimeError: The blocks are not a stream of completions.
    """
    whole = b"".join(block for _, block in blocks)
    status = whole.partition(b"\r\n")[0]
    if b" 200 " not in status + b" " or b'"error"' in whole:
        raise RuntimeError(whole[:500].decode(errors="replace"))
    counts = [(seconds, len(TEXT.findall(block))) for seconds, block in blocks]
    counts = [(seconds, count) for seconds, count in counts if count]
    if not counts:
        raise RuntimeError(f"the response has no text: {whole[-500:].decode(errors='replace')}")
    usage = COUNTED.findall(whole)
    tokens = int(usage[-1]) if usage else sum(count for _, count in counts)
    between = [later - sooner for (sooner, _), (later, _) in pairwise(counts)]
    return Answer(counts[0][0], between, tokens)


def main() -> None:
    """Read the requests from standard input, send them, and write the load as JSON."""
    asked = json.load(sys.stdin)
    print(json.dumps(asdict(asyncio.run(many(asked["url"], asked["bodies"], asked["clients"])))))


if __name__ == "__main__":
    main()
