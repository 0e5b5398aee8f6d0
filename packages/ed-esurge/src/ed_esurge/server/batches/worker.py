"""The worker that answers the batches of a server between the other requests.

The oldest batch of each owner runs. The owners share the slots of lines equally, so a large batch
does not delay the batches of other owners.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import time
from asyncio import FIRST_COMPLETED
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from pydantic_core import from_json

from ed_esurge.server.batches.lines import (
    answer_line,
    expired_line,
    interrupted_line,
    is_successful,
    line_pieces,
    release_entry,
)
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.body import LONG_BODY, aside
from ed_esurge.server.routing import Endpoint
from ed_esurge.server.stores import OPEN, BatchStore, JsonFields, open_private

logger = logging.getLogger(__name__)

# Seconds until lines without an answer are retried. The wait doubles after each failed write, up to
# the maximum.
RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
# Owners whose batches run concurrently, because a running batch has open files. Further owners wait
# until a turn ends.
MAX_OWNERS, TURN_SECONDS = 16, 60.0
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


@dataclass
class _Worker:
    """Answers the batches of up to `MAX_OWNERS` owners concurrently.

    Attributes:
        slots: the slots of running lines, which the owners share.
        since: start of the turn of each running owner.
        ended: end of the last turn of each waiting owner.
    """

    server: ServedModels
    store: BatchStore
    endpoints: Mapping[str, Endpoint]
    slots: LineSlots = field(init=False)
    since: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = LineSlots(self.store.limits.batch_concurrency)

    async def run(self) -> None:
        """Answer batches forever."""
        running: dict[str, asyncio.Task[None]] = {}
        added = self.server.batch_added
        try:
            while True:
                added.clear()
                for owner in self._waiting_owners()[: MAX_OWNERS - len(running)]:
                    self.since[owner] = time.monotonic()
                    running[owner] = asyncio.create_task(self._serve(owner))
                wakeup = asyncio.create_task(added.wait())
                try:
                    await asyncio.wait({wakeup, *running.values()}, return_when=FIRST_COMPLETED)
                finally:
                    wakeup.cancel()
                for owner in [name for name, task in running.items() if task.done()]:
                    del self.since[owner]
                    self.ended[owner] = time.monotonic()
                    running.pop(owner).result()
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _waiting_owners(self) -> list[str]:
        """Return the owners of unfinished batches that wait for a turn, longest wait first."""
        owners = {batch["owner"]: None for batch in self.store.list_unfinished()}
        waiting = [owner for owner in owners if owner not in self.since]
        return sorted(waiting, key=lambda owner: self.ended.get(owner, 0.0))

    def is_over(self, owner: str) -> bool:
        """Return whether the turn of an owner is over, because other owners wait."""
        if len(self.since) < MAX_OWNERS or time.monotonic() - self.since[owner] < TURN_SECONDS:
            return False
        return bool(self._waiting_owners())

    async def _serve(self, owner: str) -> None:
        """Answer the batches of an owner. An error of a batch or of the disk does not end this."""
        wait = RETRY_SECONDS
        while not self.is_over(owner):
            mine = (batch for batch in self.store.list_unfinished() if batch["owner"] == owner)
            batch = next(mine, None)
            if batch is None:
                return
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
                if batch["status"] in OPEN and not self.is_over(owner):
                    await asyncio.sleep(RETRY_SECONDS)  # the engine does not answer at the moment


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
        self._worker, self._server, self._store = worker, worker.server, worker.store
        self._batch = batch
        self._endpoints = {batch["endpoint"]: worker.endpoints[batch["endpoint"]]}
        self._ok, self._failed = self._store.results(batch, True), self._store.results(batch, False)
        self._done: set[int] = set()
        self._interrupted: set[int] = set()
        self._unanswered = self._is_full = False
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Answer the remaining lines. Return early if a line cannot be answered at the moment, or
        if other owners wait. The batch fails if its results exceed the quota of the owner."""
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
        store.recount_output(batch)
        counts = {"total": total}
        for key, part, file in (
            ("completed", self._ok, batch["output_file_id"]),
            ("failed", self._failed, batch["error_file_id"]),
        ):
            result_path = part if file is None else store.content(file)
            numbers = await asyncio.to_thread(_read_line_numbers, result_path)
            counts[key] = len(numbers)
            self._done |= numbers
        marks = store.get_marks_path(batch)
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
        if batch["status"] == "in_progress" and not self._is_full:
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
        if self._is_full and not cancelled:
            most = store.limits.max_stored_bytes
            message = (
                "the results of further lines would exceed the storage of this API key, "
                f"{most} bytes (max_stored_bytes): delete files, and send the other lines again"
            )
            data = {"code": "storage_quota_exceeded", "message": message, "line": None}
            listed = {"object": "list", "data": [{**data, "param": None}]}
            store.change(batch, "failed", errors=listed)
            return
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
        batch, seen, owner = self._batch, set(), self._batch["owner"]
        slots = self._worker.slots

        async def one(number: int, raw: bytes) -> None:
            try:
                entry = await self._answer(number, raw, seen, started)
            finally:
                slots.release(owner)
            if entry is None:
                return
            try:
                await self._record(entry, files)
            finally:
                release_entry(entry)

        async with asyncio.TaskGroup() as group:
            for number, raw in _number_lines(path):
                if number in self._done:
                    await asyncio.sleep(0)
                    with suppress(ValueError, KeyError, TypeError):
                        parsed = await aside(partial(from_json, raw), len(raw))
                        seen.add(parsed["custom_id"])
                    continue
                await slots.acquire(owner)
                self._unanswered = self._unanswered or self._worker.is_over(owner)
                if batch["status"] == "cancelling" or self._unanswered or self._is_full:
                    slots.release(owner)
                    break
                group.create_task(one(number, raw))
        for file in files.values():
            os.fsync(file.fileno())

    async def _record(self, entry: JsonFields, files: dict[bool, IO[bytes]]) -> None:
        """Write the answer to a line, unless the storage of the owner is full."""
        pieces, good = line_pieces(entry), is_successful(entry)
        size = sum(map(len, pieces))
        async with self._writing:
            if self._is_full or not self._store.add_output(self._batch, size):
                self._is_full = True
            elif size < LONG_BODY:
                _append(files[good], b"".join(pieces))
            else:
                await asyncio.to_thread(_append, files[good], pieces)
            if not self._is_full:
                self._batch["request_counts"]["completed" if good else "failed"] += 1

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


def _read_line_numbers(path: Path) -> set[int]:
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
            match = re.fullmatch(r"(\w+) ([+-])(\d+)\n", line)
            if match is not None:
                marks[int(match[3])] = match[2] == "+" and match[1] != session
    return {number for number, is_open in marks.items() if is_open}


def _append(file: IO[bytes], line: bytes | list[bytes]) -> None:
    """Write a complete line, or nothing.

    Args:
        line: the line, or its pieces.

    Raises:
        OSError: the line cannot be written.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        for piece in [line] if isinstance(line, bytes) else line:
            remaining_bytes = memoryview(piece)
            while remaining_bytes:
                remaining_bytes = remaining_bytes[file.write(remaining_bytes) :]
    except OSError:
        os.truncate(file.fileno(), size)
        raise


def _number_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count(path: Path) -> int:
    return sum(1 for _ in _number_lines(path))


class LineSlots:
    """Slots of running lines. A free slot goes to the waiting owner with the fewest running lines.

    Args:
        count: number of lines that run concurrently.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._running: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def acquire(self, owner: str) -> None:
        """Wait for a slot."""
        if self._free:
            self._take(owner)
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, slot))
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release(owner)
            else:
                self._waiting.remove((owner, slot))
            raise

    def release(self, owner: str) -> None:
        """Return a slot."""
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if self._waiting:
            place = min(self._waiting, key=lambda entry: self._running[entry[0]])
            self._waiting.remove(place)
            self._take(place[0])
            place[1].set_result(None)

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._running[owner] += 1
