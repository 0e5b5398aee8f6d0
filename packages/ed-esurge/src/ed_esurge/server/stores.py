"""Data that clients store on the server: files and batches in a directory, responses in memory.

    files/file-….json      metadata of a file    files/file-….data      content of a file
    batches/batch_….json   a batch               batches/batch_….ok, .failed: answered lines
                                                 batches/batch_….started: lines in progress

All data belong to the API key that created them, and other keys cannot find them. The directories
have mode 0700 and the files 0600, because they contain prompts and answers.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ed_infra.errors import ConfigError

from ed_esurge.config import ServerLimits
from ed_esurge.server.detached import DetachedAnswer
from ed_esurge.server.http.errors import APIError

JsonFields = dict[str, Any]
#: States of unfinished batches.
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
DAY = 86400


class BatchStore:
    """The files and batches of a server.

    Args:
        directory: created if it does not exist. No other server may use the directory.
        limits: limits of the stored data.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str | Path, limits: ServerLimits) -> None:
        self.limits, self._root = limits, Path(directory)
        self.session = uuid.uuid4().hex
        """Identifies the marks of this process in files of lines in progress."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for kind in ("files", "batches"):
                (self._root / kind).mkdir(mode=0o700, exist_ok=True)
                (self._root / kind).chmod(0o700)
            for part in (self._root / "files").glob("*.part"):  # of interrupted uploads
                part.unlink()
            self._files, self._batches = (self._load(kind) for kind in ("files", "batches"))
            self._growing: dict[str, int] = {}
            # Bytes of the files and the growing results of each owner.
            self._used: Counter[str] = Counter()
            for one in self._files.values():
                self._used[one["owner"]] += one["bytes"]
            for batch in self.list_unfinished():
                self.recount_output(batch)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"batch_directory {directory} cannot be used ({error}): use a directory that this "
                "process may write to"
            ) from error

    def _load(self, kind: str) -> dict[str, JsonFields]:
        records = [json.loads(path.read_text("utf-8")) for path in self._paths(kind)]
        if kind == "files":  # after an interrupted upload, the content of a file can be missing
            records = [one for one in records if self.content(one["id"]).exists()]
        return {one["id"]: one for one in sorted(records, key=lambda one: one["created_at"])}

    def _paths(self, kind: str) -> list[Path]:
        return sorted((self._root / kind).glob("*.json"))

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        path = self._root / kind / f"{fields['id']}.json"
        new = path.with_suffix(".new")
        try:
            with open_private(new, "w") as file:
                json.dump(fields, file)
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    # ---- files

    def check_room(self, owner: str, size: int = 0) -> None:
        """Check the limits of the owner before an upload.

        Args:
            size: bytes of the upload, if known.

        Raises:
            APIError: 429, the owner has `max_files` files; 413, the files of the owner would exceed
                `max_stored_bytes`.
        """
        self._check_files(owner)
        used = self.used_bytes(owner)
        if used + size > self.limits.max_stored_bytes:
            raise APIError(
                f"the files and running batches of this API key have {used} bytes, and {size} more "
                f"would exceed the limit of this server, {self.limits.max_stored_bytes} "
                "(max_stored_bytes): delete some files",
                status=413,
                code="storage_quota_exceeded",
            )

    def _check_files(self, owner: str) -> None:
        count = sum(file["owner"] == owner for file in self._files.values())
        if count >= self.limits.max_files:
            raise APIError(
                f"this API key has {count} files, the limit of this server (max_files): delete "
                "some files",
                status=429,
                code="too_many_files",
            )

    def used_bytes(self, owner: str) -> int:
        """Return the bytes of an owner's files, and of the results of unfinished batches."""
        return self._used[owner]

    def add_output(self, batch: JsonFields, size: int) -> bool:
        """Count bytes of a batch's results before they are written.

        Returns:
            False if the results would exceed `max_stored_bytes`; the bytes are not counted then.
        """
        if self.used_bytes(batch["owner"]) + size > self.limits.max_stored_bytes:
            return False
        self._set_output(batch, self._growing.get(batch["id"], 0) + size)
        return True

    def _set_output(self, batch: JsonFields, size: int) -> None:
        self._used[batch["owner"]] += size - self._growing.pop(batch["id"], 0)
        if size:
            self._growing[batch["id"]] = size

    def recount_output(self, batch: JsonFields) -> None:
        """Count the results of a batch again, because a failed write leaves fewer bytes."""
        paths = (self.results(batch, True), self.results(batch, False), self.get_marks_path(batch))
        self._set_output(batch, sum(path.stat().st_size for path in paths if path.exists()))

    def part(self) -> Path:
        """Create an empty file for the content of an upload."""
        path = self._root / "files" / f"{uuid.uuid4().hex}.part"
        open_private(path, "w").close()
        return path

    def add_file(self, name: str, purpose: str, part: Path, owner: str) -> JsonFields:
        """Store a file.

        Args:
            part: path of the content in the directory of this store. The file is moved.

        Raises:
            OSError: the directory cannot be written. `part` remains in place.
        """
        fields: JsonFields = {
            "id": f"file-{uuid.uuid4().hex}",
            "object": "file",
            "bytes": part.stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "owner": owner,
        }
        self._write("files", fields)  # first, so that a failure leaves `part` unchanged
        os.replace(part, self.content(fields["id"]))
        self._files[fields["id"]] = fields
        self._used[owner] += fields["bytes"]
        return fields

    def files(self, owner: str) -> list[JsonFields]:
        """Return the files of an owner, newest first."""
        return [one for one in reversed(self._files.values()) if one["owner"] == owner]

    def file(self, name: str, owner: str, param: str | None = None) -> JsonFields:
        """Return a file.

        Raises:
            APIError: 404.
        """
        return self._mine(self._files, name, owner, "file", param)

    def content(self, name: str) -> Path:
        """Return the path of a file's content."""
        return self._root / "files" / f"{name}.data"

    def delete_file(self, name: str, owner: str) -> None:
        """Delete a file.

        Raises:
            APIError: 404; 409, a batch reads it.
            OSError: the directory cannot be written.
        """
        self.file(name, owner)
        if any(b["input_file_id"] == name and b["status"] in OPEN for b in self._batches.values()):
            raise APIError(
                "an unfinished batch reads this file: wait until the batch has ended, or cancel it "
                "and wait",
                status=409,
            )
        self._used[owner] -= self._files.pop(name)["bytes"]
        for path in (self._root / "files" / f"{name}.json", self.content(name)):
            path.unlink(missing_ok=True)

    # ---- batches

    def add_batch(
        self, file: str, endpoint: str, metadata: dict[str, str] | None, owner: str
    ) -> JsonFields:
        """Queue a batch.

        Raises:
            APIError: 404, the file does not exist; 429, the owner has `max_batches` unfinished
                batches, or `max_files` files, which leaves no room for results.
            OSError: the directory cannot be written.
        """
        self.file(file, owner, "input_file_id")
        self._check_files(owner)
        waiting = sum(one["status"] in OPEN for one in self.batches(owner))
        if waiting >= self.limits.max_batches:
            raise APIError(
                f"{waiting} batches of this API key wait or run, the limit of this server "
                "(max_batches): try again after one of them has ended",
                status=429,
                code="rate_limit_exceeded",
            )
        now = int(time.time())
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
        fields: JsonFields = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + DAY,
            **dict.fromkeys((*times, "cancelling_at", "cancelled_at")),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            "owner": owner,
        }
        self._write("batches", fields)
        self._batches[fields["id"]] = fields
        self._forget_old(owner)
        return fields

    def _forget_old(self, owner: str) -> None:
        """Delete the oldest finished batches of an owner beyond `max_files`; their files stay."""
        mine = reversed(self.batches(owner))
        done = [one["id"] for one in mine if one["status"] not in OPEN]
        for name in done[: max(0, len(done) - self.limits.max_files)]:
            del self._batches[name]
            (self._root / "batches" / f"{name}.json").unlink(missing_ok=True)

    def batches(self, owner: str) -> list[JsonFields]:
        """Return the batches of an owner, newest first."""
        return [one for one in reversed(self._batches.values()) if one["owner"] == owner]

    def batch(self, name: str, owner: str) -> JsonFields:
        """Return a batch.

        Raises:
            APIError: 404.
        """
        return self._mine(self._batches, name, owner, "batch", None)

    def list_unfinished(self) -> list[JsonFields]:
        """Return the unfinished batches, oldest first."""
        return [one for one in self._batches.values() if one["status"] in OPEN]

    def change(self, batch: JsonFields, status: str | None = None, **fields: object) -> None:
        """Change fields of a batch, and set the time of a new status. The file is written first.

        Raises:
            OSError: the file cannot be written. The batch is unchanged.
        """
        if status is not None:
            fields |= {"status": status, f"{status}_at": int(time.time())}
        self._write("batches", {**batch, **fields})
        batch.update(fields)
        if batch["status"] not in OPEN:  # the results are files now
            self._set_output(batch, 0)

    def results(self, batch: JsonFields, ok: bool) -> Path:
        """Return the path of the answered lines (`ok`) or of the failed lines."""
        return self._root / "batches" / f"{batch['id']}.{'ok' if ok else 'failed'}"

    def get_marks_path(self, batch: JsonFields) -> Path:
        """Return the path of the marks of the lines in progress."""
        return self._root / "batches" / f"{batch['id']}.started"

    def _mine(
        self, table: Mapping[str, JsonFields], name: str, owner: str, kind: str, param: str | None
    ) -> JsonFields:
        record = table.get(name)
        if record is None or record["owner"] != owner:
            raise APIError(
                f"the {kind} {name!r:.100} does not exist",
                status=404,
                param=param,
                code=f"{kind}_not_found",
            )
        return record


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file. If the file is new, only the user of this process can read it.

    Args:
        mode: mode of `open`. Binary files are not buffered.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    if "b" in mode:
        return open(path, mode, buffering=0, opener=opener)
    return open(path, mode, encoding="utf-8", opener=opener)


@contextmanager
def refused_when_full() -> Iterator[None]:
    """Convert an error of the file system to an error of the API.

    Raises:
        APIError: 503.
    """
    try:
        yield
    except OSError as error:
        raise APIError(
            f"the server cannot write to its batch directory ({error.strerror}): try again later",
            status=503,
            code="storage_unavailable",
        ) from error


def public(fields: Mapping[str, Any]) -> JsonFields:
    """Return the public fields of a file or a batch."""
    return {name: value for name, value in fields.items() if name != "owner"}


#: Limit of the stored responses of all owners together.
_MAX_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response. The parts are JSON texts, so that `size` is the memory.

    Attributes:
        ended_status: status of a response that has ended.
        text: the response that was sent, in pieces.
        messages: lists of the messages of the conversation including the response, without
            instructions. Responses of one conversation share the earlier lists.
        facts: what a later request reads: `labels`, the labels of the MCP servers, and `requests`,
            the items that request approvals.
        items: the input items of the request.
        answer: the work and the events of a background response.
        live: the fields of a response in progress, which has no texts yet.
    """

    ended_status: str = ""
    text: list[bytes] = field(default_factory=list)
    messages: tuple[bytes, ...] = ()
    facts: bytes = b'{"labels":[],"requests":[]}'
    items: bytes = b"[]"
    answer: DetachedAnswer | None = None
    live: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The status of the response."""
        return self.ended_status if self.live is None else self.live["status"]

    @property
    def conversation_bytes(self) -> int:
        """Bytes of the messages."""
        return sum(map(len, self.messages))

    @property
    def size(self) -> int:
        """Bytes of all parts. Shared messages count in each response."""
        part_bytes = (
            sum(map(len, self.text)) + self.conversation_bytes + len(self.facts) + len(self.items)
        )
        return part_bytes + (0 if self.answer is None else self.answer.stored_bytes)


class _Shelf:
    """The responses of one owner, oldest first.

    Attributes:
        bytes: total size of the responses.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.bytes = 0

    def put(self, name: str, stored: StoredResponse) -> int:
        """Add a response, and return its size."""
        size = stored.size
        self.kept[name] = stored, size
        self.bytes += size
        return size

    def drop(self, name: str | None = None) -> int:
        """Remove a response, by default the oldest, and return its size."""
        name = next(iter(self.kept)) if name is None else name
        _, size = self.kept.pop(name)
        self.bytes -= size
        return size


class ResponseStore:
    """The latest responses of each owner, in memory.

    Args:
        most: maximum number of responses per owner. All owners together have `_MAX_BYTES`. Above
            that limit, the oldest response of the owner with the most bytes is removed.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    def put(self, name: str, stored: StoredResponse, owner: str) -> None:
        """Store a response, or replace an earlier state of a stored response.

        Args:
            name: id of the response.
            owner: see `auth.get_owner`.
        """
        shelf = self._shelves[owner]
        if name in shelf.kept:
            self._bytes -= shelf.drop(name)
        self._bytes += shelf.put(name, stored)
        while len(shelf.kept) > self._most:
            self._bytes -= shelf.drop()
        while self._bytes > _MAX_BYTES:
            self._bytes -= max(self._shelves.values(), key=lambda candidate: candidate.bytes).drop()

    def recount(self, name: str, owner: str) -> None:
        """Count the bytes of a response again, if it is stored: its events have grown."""
        entry = self._shelves[owner].kept.get(name)
        if entry is not None:
            self.put(name, entry[0], owner)

    def get(self, name: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Return a response.

        Raises:
            APIError: 404, the owner has no response of that id.
        """
        entry = self._shelves[owner].kept.get(name)
        if entry is None:
            raise APIError(
                f"the response {name!r:.100} does not exist: it was not stored, was deleted, or "
                f"was replaced by later responses (the last {self._most} are stored)",
                status=404,
                param=param,
                code="response_not_found",
            )
        return entry[0]

    def delete(self, name: str, owner: str) -> None:
        """Delete a response. Raises APIError: 404."""
        self.get(name, owner)
        self._bytes -= self._shelves[owner].drop(name)
