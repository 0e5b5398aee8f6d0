"""Files and batches in a directory: what survives the end of the server.

    files/file-….json      what a file is        files/file-….data      its bytes
    batches/batch_….json   a batch               batches/batch_….ok, .failed: its lines so far

Everything belongs to the API key that brought it, and is not there for others.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError

from ed_esurge.config import ServerLimits
from ed_esurge.server.errors import APIError

Fields = dict[str, Any]
#: States in which there is still something to do.
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
DAY = 86400


class BatchStore:
    """The files and batches of a server.

    Args:
        directory: made if it is not there; no other server may use it at the same time.
        limits: how much clients may leave there.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str | Path, limits: ServerLimits) -> None:
        self.limits, self._root = limits, Path(directory)
        try:
            for kind in ("files", "batches"):
                (self._root / kind).mkdir(parents=True, exist_ok=True)
            for left in (self._root / "files").glob("*.part"):  # cut off while they came
                left.unlink()
            self._files, self._batches = (self._load(kind) for kind in ("files", "batches"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"batch_directory {directory} cannot be used ({error}): give a directory that this "
                "process may write to"
            ) from error

    def _load(self, kind: str) -> dict[str, Fields]:
        known = [json.loads(path.read_text("utf-8")) for path in self._paths(kind)]
        return {one["id"]: one for one in sorted(known, key=lambda one: one["created_at"])}

    def _paths(self, kind: str) -> list[Path]:
        return sorted((self._root / kind).glob("*.json"))

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        path = self._root / kind / f"{fields['id']}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(fields), "utf-8")
        os.replace(new, path)

    # ---- files

    def check_room(self, owner: str) -> None:
        """Refuse somebody who has as many files as there may be.

        Raises:
            APIError: 429.
        """
        mine = sum(file["owner"] == owner for file in self._files.values())
        if mine >= self.limits.max_files:
            raise APIError(
                f"{mine} files are kept, which is this server's limit: delete some",
                status=429,
                code="too_many_files",
            )

    def part(self) -> Path:
        """Where a file that comes may be written before it is kept."""
        return self._root / "files" / f"{uuid.uuid4().hex}.part"

    def add_file(self, name: str, purpose: str, part: Path, owner: str) -> Fields:
        """Keep a file.

        Args:
            part: where it was written, in the directory of this store; it is moved.
        """
        fields: Fields = {
            "id": f"file-{uuid.uuid4().hex}",
            "object": "file",
            "bytes": part.stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "owner": owner,
        }
        os.replace(part, self.content(fields["id"]))
        self._write("files", fields)
        self._files[fields["id"]] = fields
        return fields

    def files(self, owner: str) -> list[Fields]:
        """The files of somebody, newest first."""
        return [one for one in reversed(self._files.values()) if one["owner"] == owner]

    def file(self, name: str, owner: str, param: str | None = None) -> Fields:
        """A file.

        Raises:
            APIError: 404.
        """
        return self._mine(self._files, name, owner, "file", param)

    def content(self, name: str) -> Path:
        """Where the bytes of a file are."""
        return self._root / "files" / f"{name}.data"

    def delete_file(self, name: str, owner: str) -> None:
        """Forget a file.

        Raises:
            APIError: 404; 409, a batch reads it.
        """
        self.file(name, owner)
        if any(b["input_file_id"] == name and b["status"] in OPEN for b in self._batches.values()):
            raise APIError("a batch that runs reads this file: cancel it first", status=409)
        del self._files[name]
        for path in (self._root / "files" / f"{name}.json", self.content(name)):
            path.unlink(missing_ok=True)

    # ---- batches

    def add_batch(
        self, file: str, endpoint: str, metadata: dict[str, str] | None, owner: str
    ) -> Fields:
        """Take a batch, to be run later.

        Raises:
            APIError: 404, there is no such file; 429, too many batches wait.
        """
        self.file(file, owner, "input_file_id")
        waiting = sum(one["status"] in OPEN for one in self._batches.values())
        if waiting >= self.limits.max_batches:
            raise APIError(
                f"{waiting} batches wait, which is this server's limit: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        now = int(time.time())
        times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
        fields: Fields = {
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
        self._batches[fields["id"]] = fields
        self._write("batches", fields)
        self._forget_old()
        return fields

    def _forget_old(self) -> None:
        """Finished batches make room; their files stay."""
        done = [one["id"] for one in self._batches.values() if one["status"] not in OPEN]
        for name in done[: max(0, len(done) - self.limits.max_files)]:
            del self._batches[name]
            (self._root / "batches" / f"{name}.json").unlink(missing_ok=True)

    def batches(self, owner: str) -> list[Fields]:
        """The batches of somebody, newest first."""
        return [one for one in reversed(self._batches.values()) if one["owner"] == owner]

    def batch(self, name: str, owner: str) -> Fields:
        """A batch.

        Raises:
            APIError: 404.
        """
        return self._mine(self._batches, name, owner, "batch", None)

    def next(self) -> Fields | None:
        """The oldest batch with something to do."""
        return next((one for one in self._batches.values() if one["status"] in OPEN), None)

    def change(self, batch: Fields, status: str | None = None, **fields: Any) -> None:
        """Write down what became of a batch; a new status has its time."""
        if status is not None:
            fields |= {"status": status, f"{status}_at": int(time.time())}
        batch.update(fields)
        self._write("batches", batch)

    def results(self, batch: Fields, ok: bool) -> Path:
        """Where the answered lines of a batch are, or those that failed, while it runs."""
        return self._root / "batches" / f"{batch['id']}.{'ok' if ok else 'failed'}"

    def _mine(
        self, table: Mapping[str, Fields], name: str, owner: str, kind: str, param: str | None
    ) -> Fields:
        known = table.get(name)
        if known is None or known["owner"] != owner:
            raise APIError(
                f"there is no {kind} {name!r:.100}",
                status=404,
                param=param,
                code=f"{kind}_not_found",
            )
        return known


def public(fields: Mapping[str, Any]) -> Fields:
    """What clients see of a file or a batch."""
    return {name: value for name, value in fields.items() if name != "owner"}
