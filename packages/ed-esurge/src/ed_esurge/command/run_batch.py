"""Batch processing: answer the requests of a file, one per line, in the same order."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from ed_infra.errors import ConfigError
from ed_infra.options import Options

from ed_esurge.command.flags import Flags
from ed_esurge.command.load import EngineFlags, ModelFlags, ModelPath, create_engine
from ed_esurge.command.program import Result, is_json, is_quiet

if TYPE_CHECKING:
    from ed_esurge.server.generation.served_models import ServedModels


class BatchOptions(Options):
    """Options of a batch."""

    served_model_name: tuple[str, ...] | None = None
    """What the requests call the model."""
    concurrency: int = 64
    """Lines that are answered at once."""


def run_batch(
    model: ModelPath,
    loading: ModelFlags,
    engine: EngineFlags,
    options: Annotated[BatchOptions, Flags("batch")],
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", help="Requests, one a line; - is stdin.")
    ],
    output_file: Annotated[str, typer.Option("--output-file", "-o", help="Answers; - is stdout.")],
) -> Result:
    """Answer the requests of a file, one per line, in the same order.

    Lines are OpenAI's, {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {…}}.
    The answer to an invalid line is its error. The other lines are processed.

    \b
    esurge run-batch MODEL -i requests.jsonl -o answers.jsonl
    """
    if options.concurrency < 1:
        raise ConfigError(f"--concurrency is at least 1, not {options.concurrency}")
    if output_file == "-" and is_json():
        raise ConfigError("--json and --output-file - both write to standard output: keep one")
    with ExitStack() as files:
        try:
            source = files.enter_context(_open(input_file, "rb"))
            to = files.enter_context(_open(output_file, "wb"))
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be opened: {error.strerror}") from None
        from ed_esurge.server import create_app

        served_engine = create_engine(loading.replace(model=model, engine=engine))
        app = create_app(served_engine, served_model_name=options.served_model_name)

        async def everything() -> tuple[int, int]:
            async with app.router.lifespan_context(app):
                return await answer_lines(app.state.server, source, to, options.concurrency)

        good, bad = asyncio.run(everything())
    if not is_quiet():
        print(f"{good} lines were answered, {bad} failed", file=sys.stderr)
    return Result({"answered": good, "failed": bad})


def _open(name: str, mode: str) -> IO[bytes]:
    if name != "-":
        return open(name, mode)
    return open(0 if "r" in mode else 1, mode, closefd=False)


async def answer_lines(
    server: ServedModels, source: IO[bytes], to: IO[bytes], concurrency: int
) -> tuple[int, int]:
    """Answer lines in order, several concurrently.

    Returns:
        the number of lines with a result, and the number of failed lines.
    """
    from ed_esurge.server.batches.lines import (
        answer_line,
        is_successful,
        line_pieces,
        release_entry,
    )
    from ed_esurge.server.endpoints import get_batched_endpoints

    seen: set[str] = set()
    batched = get_batched_endpoints()
    running: deque[asyncio.Task[dict[str, Any]]] = deque()
    counts = {True: 0, False: 0}

    async def write() -> None:
        entry = await running.popleft()
        counts[is_successful(entry)] += 1
        to.writelines(line_pieces(entry, ascii_only=False))
        release_entry(entry)
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
