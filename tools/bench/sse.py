"""A client that costs little: streamed completions over plain sockets, and when each piece came.

What it costs is the same for every server, and is in nobody's process: `load` runs it in its own.
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
        first: seconds from sending to the first piece of text.
        between: seconds between pieces that did not come together.
        tokens: as the server counts them; pieces, where it does not.
    """

    first: float = 0.0
    between: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Load:
    """What some clients got.

    Attributes:
        seconds: from the first request to the last byte.
    """

    seconds: float
    answers: list[Answer]

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def percentile(self, part: str, share: int) -> float:
        """Milliseconds of "first" or "between" that so many percent do not exceed; 0 of none."""
        if part == "first":
            values = sorted(answer.first for answer in self.answers)
        else:
            values = sorted(gap for answer in self.answers for gap in answer.between)
        return 1e3 * values[max(-(-len(values) * share // 100) - 1, 0)] if values else 0.0


def load(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """Send completions to a server, so many at a time, from a process of its own.

    Args:
        url: with /v1.
        bodies: of `POST /v1/completions`; with `stream`.

    Raises:
        RuntimeError: a request was not answered.
    """
    asked = json.dumps({"url": url, "bodies": list(bodies), "clients": clients})
    command = [sys.executable, "-m", "tools.bench.sse"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{url}: {done.stderr[-1000:]}")
    got = json.loads(done.stdout)
    return Load(got["seconds"], [Answer(**answer) for answer in got["answers"]])


async def many(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> Load:
    """`load`, in this process."""
    waiting, answers = iter(bodies), []

    async def one_client() -> None:
        for body in waiting:
            answers.append(await ask(url, body))

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    return Load(time.perf_counter() - began, answers)


async def ask(url: str, body: dict[str, Any]) -> Answer:
    """One completion, read to the end of its connection."""
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
    """What came when.

    Args:
        blocks: seconds, and bytes as they came.

    Raises:
        RuntimeError: they are no stream of completions.
    """
    whole = b"".join(block for _, block in blocks)
    status = whole.partition(b"\r\n")[0]
    if b" 200 " not in status + b" " or b'"error"' in whole:
        raise RuntimeError(whole[:500].decode(errors="replace"))
    counts = [(seconds, len(TEXT.findall(block))) for seconds, block in blocks]
    counts = [(seconds, count) for seconds, count in counts if count]
    if not counts:
        raise RuntimeError(f"no text came: {whole[-500:].decode(errors='replace')}")
    told = COUNTED.findall(whole)
    tokens = int(told[-1]) if told else sum(count for _, count in counts)
    between = [later - sooner for (sooner, _), (later, _) in pairwise(counts)]
    return Answer(counts[0][0], between, tokens)


def main() -> None:
    """Read what to ask from standard input, ask, and write what came as JSON."""
    asked = json.load(sys.stdin)
    print(json.dumps(asdict(asyncio.run(many(asked["url"], asked["bodies"], asked["clients"])))))


if __name__ == "__main__":
    main()
