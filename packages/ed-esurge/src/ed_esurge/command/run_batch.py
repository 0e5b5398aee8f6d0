"""Batch processing: answer the requests of a file, one per line, in the same order.

    python -m ed_esurge run-batch MODEL -i requests.jsonl -o answers.jsonl

Lines are OpenAI's, {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}.
The answer to an invalid line is its error. The other lines are processed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_esurge.command.load import add_model_arguments, create_engine

if TYPE_CHECKING:
    from ed_esurge.server.generation.served_models import ServedModels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the files, the engine and the model."""
    add_model_arguments(parser)
    group = parser.add_argument_group("files")
    group.add_argument("-i", "--input-file", required=True, help="requests, one a line; - is stdin")
    group.add_argument("-o", "--output-file", required=True, help="answers; - is stdout")
    group.add_argument("--served-model-name", nargs="+", help="what the requests call the model")
    group.add_argument("--concurrency", type=int, default=64, help="lines at once (%(default)s)")


def run(values: argparse.Namespace) -> int:
    """Load the model and answer every line."""
    if values.concurrency < 1:
        raise ConfigError(f"--concurrency is at least 1, not {values.concurrency}")
    with ExitStack() as files:
        try:
            source = files.enter_context(_open(values.input_file, "rb"))
            to = files.enter_context(_open(values.output_file, "wb"))
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be opened: {error.strerror}") from None
        from ed_esurge.server import create_app

        app = create_app(create_engine(values), served_model_name=values.served_model_name)

        async def everything() -> tuple[int, int]:
            async with app.router.lifespan_context(app):
                return await answer_lines(app.state.server, source, to, values.concurrency)

        good, bad = asyncio.run(everything())
    print(f"{good} lines were answered, {bad} failed", file=sys.stderr)
    return 0


def _open(name: str, mode: str) -> IO[bytes]:
    if name != "-":
        return open(name, mode)
    return open((sys.stdin if "r" in mode else sys.stdout).fileno(), mode, closefd=False)


async def answer_lines(
    server: ServedModels, source: IO[bytes], to: IO[bytes], concurrency: int
) -> tuple[int, int]:
    """Answer lines in order, several concurrently.

    Returns:
        the number of lines with a result, and the number of failed lines.
    """
    from ed_esurge.server.batches.lines import answer_line, is_successful, line_pieces, release
    from ed_esurge.server.endpoints import get_batched_endpoints

    seen: set[str] = set()
    batched = get_batched_endpoints()
    running: deque[asyncio.Task[dict[str, Any]]] = deque()
    counts = {True: 0, False: 0}

    async def write() -> None:
        entry = await running.popleft()
        counts[is_successful(entry)] += 1
        to.writelines(line_pieces(entry, ascii_only=False))
        release(entry)
        to.flush()

    for number, raw in _number_lines(source):
        if len(running) >= concurrency:
            await write()
        task = answer_line(server, raw, f"batch_req_{number}", batched, seen=seen)
        running.append(asyncio.create_task(task))
    while running:
        await write()
    return counts[True], counts[False]


def _number_lines(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(source, 1) if line.strip())
