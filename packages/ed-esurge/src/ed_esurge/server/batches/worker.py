"""The worker that answers the batches of a server, one at a time, between the other requests."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ed_esurge.server.batches.lines import (
    answer_line,
    expired_line,
    interrupted_line,
    succeeded,
)
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.routing import Endpoint
from ed_esurge.server.stores import OPEN, BatchStore, JsonFields, open_private

logger = logging.getLogger(__name__)

# Seconds until lines without an answer are retried. The wait doubles after each failed write, up to
# the maximum.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
# Errors of a full or unavailable disk, which may be temporary.
TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)


@asynccontextmanager
async def running(server: ServedModels, endpoints: Mapping[str, Endpoint]) -> AsyncIterator[None]:
    """Answer batches during the block. The next start resumes an unfinished batch.

    Args:
        endpoints: the endpoints that lines may call, by path.
    """
    store = server.batches
    if store is None:
        yield
        return
    task = asyncio.create_task(_always(_Worker(server, store, endpoints)))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@dataclass(frozen=True)
class _Worker:
    server: ServedModels
    store: BatchStore
    endpoints: Mapping[str, Endpoint]

    async def run(self) -> None:
        """Answer batches forever. An error of a batch or of the disk does not end the loop."""
        wait = RETRY_SECONDS
        while True:
            batch = self.store.next()
            if batch is None:
                self.server.batch_added.clear()
                await self.server.batch_added.wait()
                continue
            try:
                await _BatchRun(self, batch).run()
            except Exception as group:
                error = _first(group)
                self.server.metrics.batch_failures.inc()
                reason = _temporary(error)
                if reason is not None and time.time() < batch["expires_at"]:
                    self.server.stall_batches(f"files of batches cannot be written: {reason}")
                    logger.error("batch %s is retried in %g s: %s", batch["id"], wait, reason)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, MAX_RETRY_SECONDS)
                    continue
                logger.error("batch %s failed", batch["id"], exc_info=error)
                _fail(self.store, batch, error)
            else:
                wait = RETRY_SECONDS
                self.server.stall_batches(None)
                if batch["status"] in OPEN:  # the engine does not answer at the moment
                    await asyncio.sleep(RETRY_SECONDS)


async def _always(worker: _Worker) -> None:
    """Restart the worker after an unexpected error."""
    while True:
        try:
            await worker.run()
        except Exception:
            logger.exception("the batch worker failed and restarts")
            await asyncio.sleep(RETRY_SECONDS)


def _temporary(error: BaseException) -> str | None:
    """Return the text of a temporary error, without paths; None for other errors."""
    return error.strerror if isinstance(error, OSError) and error.errno in TEMPORARY else None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(store: BatchStore, batch: JsonFields, error: BaseException) -> None:
    """End a batch with an error.

    If the file of the batch cannot be written, the next start of the server runs the batch again.
    """
    problem = {"code": "internal_error", "message": "the server failed on this batch"}
    if isinstance(error, OSError):
        problem["message"] = f"the files of the batch cannot be read or written: {error.strerror}"
    listed = {"object": "list", "data": [{**problem, "line": None, "param": None}]}
    try:
        store.change(batch, "failed", errors=listed)
    except OSError:
        batch.update(status="failed", failed_at=int(time.time()), errors=listed)


class _BatchRun:
    def __init__(self, worker: _Worker, batch: JsonFields) -> None:
        self._server, self._store, self._batch = worker.server, worker.store, batch
        self._endpoints = {batch["endpoint"]: worker.endpoints[batch["endpoint"]]}
        self._ok, self._failed = self._store.results(batch, True), self._store.results(batch, False)
        self._done: set[int] = set()
        self._interrupted: set[int] = set()
        self._unanswered = False

    async def run(self) -> None:
        """Answer the remaining lines. Return early if a line cannot be answered at the moment."""
        store, batch = self._store, self._batch
        path = store.content(batch["input_file_id"])
        total = await asyncio.to_thread(_count, path)
        most = store.limits.max_batch_requests
        if total > most or not total:
            message = (
                f"the file has {total} lines, and the limit is 1 to {most}: send several files"
            )
            data = {"code": "invalid_file", "message": message, "line": None}
            errors = {"object": "list", "data": [{**data, "param": "input_file_id"}]}
            store.change(batch, "failed", errors=errors)
            return
        counts = {"total": total}
        for key, part, file in (
            ("completed", self._ok, batch["output_file_id"]),
            ("failed", self._failed, batch["error_file_id"]),
        ):
            written = part if file is None else store.content(file)
            numbers = await asyncio.to_thread(_recorded, written)
            counts[key] = len(numbers)
            self._done |= numbers
        marks = store.started(batch)
        self._interrupted = await asyncio.to_thread(_open_marks, marks, store.session) - self._done
        if batch["status"] == "validating":
            store.change(batch, "in_progress")
        # On a full disk, this write fails before any line is answered.
        store.change(batch, request_counts=counts)
        with (
            open_private(self._ok, "ab") as ok,
            open_private(self._failed, "ab") as failed,
            open_private(marks, "ab") as started,
        ):
            await self._lines(path, {True: ok, False: failed}, started)
        cancelled = batch["status"] == "cancelling"
        if self._unanswered and not cancelled:
            return
        if batch["status"] == "in_progress":
            store.change(batch, "finalizing")
        for key, part, name in (
            ("output_file_id", self._ok, "output"),
            ("error_file_id", self._failed, "error"),
        ):
            if part.stat().st_size:
                title = f"{batch['id']}_{name}.jsonl"
                file = store.add_file(title, "batch_output", part, batch["owner"])
                # Set before the next write, so that an error does not add the file again.
                batch[key] = file["id"]
                store.change(batch)
            else:
                part.unlink()
        marks.unlink(missing_ok=True)
        expired = batch["expired_at"] is not None
        end = "cancelled" if cancelled else "expired" if expired else "completed"
        store.change(batch, end)

    @property
    def _left(self) -> float:
        """Seconds until the batch expires."""
        return self._batch["expires_at"] - time.time()

    async def _lines(self, path: Path, files: dict[bool, IO[bytes]], started: IO[bytes]) -> None:
        """Answer the lines, several concurrently, and write each answer when it is complete.

        Args:
            files: files of the answers (True) and of the failed lines (False).
            started: file of the marks of lines in progress.
        """
        batch, seen = self._batch, set()
        gate = asyncio.Semaphore(self._store.limits.batch_concurrency)

        async def one(number: int, raw: bytes) -> None:
            try:
                entry = await self._answer(number, raw, seen, started)
            finally:
                gate.release()
            if entry is None:
                return
            good = succeeded(entry)
            _append(files[good], json.dumps(entry).encode() + b"\n")
            batch["request_counts"]["completed" if good else "failed"] += 1

        async with asyncio.TaskGroup() as group:
            for number, raw in _numbered(path):
                if number in self._done:
                    with suppress(ValueError, KeyError, TypeError):
                        seen.add(json.loads(raw)["custom_id"])
                    continue
                await gate.acquire()
                if batch["status"] == "cancelling" or self._unanswered:
                    gate.release()
                    break
                group.create_task(one(number, raw))
        for file in files.values():
            os.fsync(file.fileno())

    async def _answer(
        self, number: int, raw: bytes, seen: set[str], started: IO[bytes]
    ) -> JsonFields | None:
        """Return the answer to a line; None if the line cannot be answered at the moment.

        A mark of a dead process identifies a line that may have caused its death. Such a line
        fails, because a second attempt could end this process as well.
        """
        batch, session = self._batch, self._store.session
        name = f"batch_req_{batch['id'].removeprefix('batch_')}_{number}"
        if number in self._interrupted:
            return interrupted_line(raw, name)
        entry: JsonFields | None = None
        try:
            if self._left <= 0:
                raise TimeoutError
            _append(started, f"{session} +{number}\n".encode())
            async with asyncio.timeout(self._left):
                entry = await answer_line(
                    self._server,
                    raw,
                    name,
                    self._endpoints,
                    owner=batch["owner"],
                    seen=seen,
                )
            if (entry["response"] or {}).get("status_code") == 503:
                self._unanswered, entry = True, None
        except TimeoutError:
            entry = expired_line(raw, name)
            if batch["expired_at"] is None:
                self._store.change(batch, "finalizing", expired_at=int(time.time()))
        finally:
            if entry is None:  # the server stops, or the engine does not answer
                _append(started, f"{session} -{number}\n".encode())
        return entry


def _recorded(path: Path) -> set[int]:
    """Return the numbers of the lines in a result file, and remove an incomplete last line."""
    numbers: set[int] = set()
    if not path.exists():
        return numbers
    size = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, size)
                break
            size += len(line)
            numbers.add(int(re.findall(rb'"id": ?"[^"]*_(\d+)"', line)[0]))
    return numbers


def _open_marks(path: Path, session: str) -> set[int]:
    """Return the numbers of the lines that another process had in progress."""
    marks: dict[int, bool] = {}
    if path.exists():
        for line in path.read_text("ascii", "replace").splitlines(keepends=True):
            found = re.fullmatch(r"(\w+) ([+-])(\d+)\n", line)
            if found is not None:
                marks[int(found[3])] = found[2] == "+" and found[1] != session
    return {number for number, is_open in marks.items() if is_open}


def _append(file: IO[bytes], line: bytes) -> None:
    """Write a complete line, or nothing.

    Raises:
        OSError: the line cannot be written.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.truncate(file.fileno(), size)
        raise


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count(path: Path) -> int:
    return sum(1 for _ in _numbered(path))
