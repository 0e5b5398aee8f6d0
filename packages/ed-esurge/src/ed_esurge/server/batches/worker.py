"""The batches of a server, one after the other, beside the requests of those who wait."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from ed_esurge.server.batches.lines import (
    answer_line,
    expired_line,
    interrupted_line,
    succeeded,
)
from ed_esurge.server.generation.site import Site
from ed_esurge.server.stores import OPEN, BatchStore, Fields, open_private

logger = logging.getLogger(__name__)

# Seconds until lines are tried again that a server or an engine that stops did not answer. After a
# failed write the wait doubles with each failure, up to the longest.
PATIENCE, LONGEST = 1.0, 60.0
# Errors of a disk that is full or does not answer, and may do so again.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[None]:
    """Run the batches of a server while it runs. One that is cut off goes on at the next start,
    with the lines that have no answer."""
    store = site.batches
    if store is None:
        yield
        return
    task = asyncio.create_task(_always(site, store))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _always(site: Site, store: BatchStore) -> None:
    """Start the worker again whenever it ends."""
    while True:
        try:
            await _run(site, store)
        except Exception:
            logger.exception("the batch worker failed and starts again")
            await asyncio.sleep(PATIENCE)


async def _run(site: Site, store: BatchStore) -> None:
    """Run batches for ever. No failure of a batch or of the disk ends the loop."""
    wait = PATIENCE
    while True:
        batch = store.next()
        if batch is None:
            site.batched.clear()
            await site.batched.wait()
            continue
        try:
            await _Run(site, store, batch).whole()
        except Exception as group:
            error = _first(group)
            site.metrics.batch_failures.inc()
            reason = _passing(error)
            if reason is not None and time.time() < batch["expires_at"]:
                site.stall_batches(f"files of batches cannot be written: {reason}")
                logger.error("batch %s waits %g s: %s", batch["id"], wait, site.batch_trouble)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST)
                continue
            logger.error("batch %s failed", batch["id"], exc_info=error)
            _fail(store, batch, error)
        else:
            wait = PATIENCE
            site.stall_batches(None)
            if batch["status"] in OPEN:  # nobody answers now
                await asyncio.sleep(PATIENCE)


def _passing(error: BaseException) -> str | None:
    """Return the text of an error that may pass, without paths; None for other errors."""
    return error.strerror if isinstance(error, OSError) and error.errno in PASSING else None


def _first(error: BaseException) -> BaseException:
    """Return the first error of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(store: BatchStore, batch: Fields, error: BaseException) -> None:
    """End a batch with an error. If its file cannot be written, the next start runs it again."""
    said = {"code": "internal_error", "message": "the server failed on this batch"}
    if isinstance(error, OSError):
        said["message"] = f"its files cannot be read or written: {error.strerror}"
    listed = {"object": "list", "data": [{**said, "line": None, "param": None}]}
    try:
        store.change(batch, "failed", errors=listed)
    except OSError:
        batch.update(status="failed", failed_at=int(time.time()), errors=listed)


class _Run:
    """One batch on its way."""

    def __init__(self, site: Site, store: BatchStore, batch: Fields) -> None:
        self._site, self._store, self._batch = site, store, batch
        self._ok, self._failed = store.results(batch, True), store.results(batch, False)
        self._done: set[int] = set()
        self._interrupted: set[int] = set()
        self._unanswered = False

    async def whole(self) -> None:
        """From where it stands to its end, or until a line cannot be answered now."""
        store, batch = self._store, self._batch
        path = store.content(batch["input_file_id"])
        total = await asyncio.to_thread(_count, path)
        most = store.limits.max_batch_requests
        if total > most or not total:
            said = f"has {total} lines, and this server takes 1 to {most}: send several files"
            data = {"code": "invalid_file", "message": f"the file {said}", "line": None}
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
        # On a full disk this fails before lines are answered for nothing.
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
                batch[key] = file["id"]  # at once: a later failure must not add the file again
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
        """Answer the lines, several at a time, and write each answer as it comes.

        Args:
            files: where answers and failures are written.
            started: where lines are marked that are being answered.
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
    ) -> Fields | None:
        """Return the answer to a line; None if the line cannot be answered now.

        A mark that a dead process left stands for a line that may have ended the process. The line
        fails, because a second attempt could end this process, too.
        """
        batch, session = self._batch, self._store.session
        name = f"batch_req_{batch['id'].removeprefix('batch_')}_{number}"
        if number in self._interrupted:
            return interrupted_line(raw, name)
        entry: Fields | None = None
        try:
            if self._left <= 0:
                raise TimeoutError
            _append(started, f"{session} +{number}\n".encode())
            async with asyncio.timeout(self._left):
                entry = await answer_line(
                    self._site,
                    raw,
                    name,
                    owner=batch["owner"],
                    endpoint=batch["endpoint"],
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
    """Return the numbers of the lines in a file of results; remove a half-written last line."""
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
    """Return the numbers of the lines that a process of another session was answering."""
    marks: dict[int, bool] = {}
    if path.exists():
        for line in path.read_text("ascii", "replace").splitlines(keepends=True):
            found = re.fullmatch(r"(\w+) ([+-])(\d+)\n", line)
            if found is not None:
                marks[int(found[3])] = found[2] == "+" and found[1] != session
    return {number for number, is_open in marks.items() if is_open}


def _append(file: IO[bytes], line: bytes) -> None:
    """Write a whole line, or none of it.

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
    """The lines that are not empty, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count(path: Path) -> int:
    return sum(1 for _ in _numbered(path))
