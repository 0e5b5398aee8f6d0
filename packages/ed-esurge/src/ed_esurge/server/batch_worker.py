"""The batches of a server, one after the other, beside the requests of those who wait."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

from ed_esurge.server.batch_lines import answer_line, expired_line, succeeded
from ed_esurge.server.batch_store import OPEN, BatchStore, Fields
from ed_esurge.server.site import Site

logger = logging.getLogger(__name__)

# Seconds until lines are tried again that a server or an engine that stops did not answer.
PATIENCE = 1.0


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[None]:
    """Run the batches of a server while it runs. One that is cut off goes on at the next start,
    with the lines that have no answer."""
    store = site.batches
    if store is None:
        yield
        return
    task = asyncio.create_task(_run(site, store))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _run(site: Site, store: BatchStore) -> None:
    while True:
        batch = store.next()
        if batch is None:
            site.batched.clear()
            await site.batched.wait()
            continue
        try:
            await _Run(site, store, batch).whole()
            if batch["status"] in OPEN:  # nobody answers now
                await asyncio.sleep(PATIENCE)
        except Exception as error:
            logger.exception("a batch failed")
            said = {"code": "internal_error", "message": "the server failed on this batch"}
            if isinstance(error, OSError):
                said["message"] = f"its files cannot be read or written: {error.strerror}"
            listed = {"object": "list", "data": [{**said, "line": None, "param": None}]}
            store.change(batch, "failed", errors=listed)


class _Run:
    """One batch on its way."""

    def __init__(self, site: Site, store: BatchStore, batch: Fields) -> None:
        self._site, self._store, self._batch = site, store, batch
        self._ok, self._failed = store.results(batch, True), store.results(batch, False)
        self._done: set[int] = set()
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
        counts = {"total": total, "completed": self._before(self._ok), "failed": 0}
        counts["failed"] = self._before(self._failed)
        if batch["status"] == "validating":
            store.change(batch, "in_progress")
        store.change(batch, request_counts=counts)
        with self._ok.open("ab") as ok, self._failed.open("ab") as failed:
            await self._lines(path, {True: ok, False: failed})
        cancelled = batch["status"] == "cancelling"
        if self._unanswered and not cancelled:
            return
        if batch["status"] == "in_progress":
            store.change(batch, "finalizing")
        files: dict[str, str | None] = {}
        for key, part, name in (
            ("output_file_id", self._ok, "output"),
            ("error_file_id", self._failed, "error"),
        ):
            if part.stat().st_size:
                title = f"{batch['id']}_{name}.jsonl"
                files[key] = store.add_file(title, "batch_output", part, batch["owner"])["id"]
            else:
                part.unlink()
        expired = batch["expired_at"] is not None
        end = "cancelled" if cancelled else "expired" if expired else "completed"
        store.change(batch, end, **files)

    @property
    def _left(self) -> float:
        """Seconds until the batch expires."""
        return self._batch["expires_at"] - time.time()

    def _before(self, path: Path) -> int:
        """Count the whole lines of an earlier start; what was cut off is dropped."""
        kept: list[bytes] = []
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    kept.append(line)
                    self._done.add(int(re.findall(rb'"id": ?"[^"]*_(\d+)"', line)[0]))
        path.write_bytes(b"".join(kept))
        return len(kept)

    async def _lines(self, path: Path, files: dict[bool, IO[bytes]]) -> None:
        """Answer the lines, several at a time, and write each as it is answered."""
        batch, seen = self._batch, set()
        gate = asyncio.Semaphore(self._store.limits.batch_concurrency)

        async def one(number: int, raw: bytes) -> None:
            name = f"batch_req_{batch['id'].removeprefix('batch_')}_{number}"
            try:
                if self._left <= 0:
                    raise TimeoutError
                async with asyncio.timeout(self._left):
                    entry = await answer_line(
                        self._site, raw, name, endpoint=batch["endpoint"], seen=seen
                    )
                if (entry["response"] or {}).get("status_code") == 503:
                    self._unanswered = True
                    return
            except TimeoutError:
                entry = expired_line(raw, name)
                if batch["expired_at"] is None:
                    self._store.change(batch, "finalizing", expired_at=int(time.time()))
            finally:
                gate.release()
            good = succeeded(entry)
            files[good].write(json.dumps(entry).encode() + b"\n")
            files[good].flush()
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


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, numbered from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _count(path: Path) -> int:
    return sum(1 for _ in _numbered(path))
