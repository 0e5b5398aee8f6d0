"""A full disk stalls a batch, loses no answer, and is reported."""

from __future__ import annotations

import errno
import json
import os
import stat
import time

import httpx
import pytest
from ed_esurge.config import ServerLimits
from ed_esurge.server import stores
from ed_esurge.server.batches import worker
from ed_esurge.server.batches.worker import _append, _read_line_numbers
from ed_esurge.server.launch import background
from ed_esurge.server.stores import BatchStore
from ed_esurge.testing import ScriptedEngine


class Disk:
    """Makes writes of private files fail while `full` is set."""

    def __init__(self, monkeypatch):
        self.full = False
        self.refused = 0
        original = stores.open_private

        def open_private(path, mode):
            self.check()
            return original(path, mode)

        def append(file, line):
            self.check()
            return _append(file, line)

        monkeypatch.setattr(stores, "open_private", open_private)
        monkeypatch.setattr(worker, "open_private", open_private)
        monkeypatch.setattr(worker, "_append", append)
        monkeypatch.setattr(worker, "RETRY_SECONDS", 0.05)

    def check(self):
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def order(url, count):
    """Upload a file of requests and start its batch."""
    body = {"prompt": "a", "max_tokens": 8}
    rows = [
        json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body})
        for i in range(count)
    ]
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", "\n".join(rows).encode())}
    file = httpx.post(f"{url}/files", files=form).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return httpx.post(f"{url}/batches", json=asked)


@pytest.mark.nightly
def test_batch_continues_when_the_disk_has_space_again(tmp_path, disk):
    engine = ScriptedEngine(lambda prompt, choice: "x" * 8, delay=0.01)
    options = {"batch_directory": tmp_path, "limits": {"batch_concurrency": 2}}
    with background(engine, **options) as url:
        root = url.removesuffix("/v1")
        batch = order(url, 20).json()["id"]
        until(lambda: httpx.get(f"{url}/batches/{batch}").json()["request_counts"]["completed"] > 2)
        disk.full = True
        until(lambda: disk.refused > 3)
        health = httpx.get(f"{root}/health")
        assert health.status_code == 200
        assert "No space left" in health.json()["degraded"]["batches"]
        assert "esurge:batches_stalled 1.0" in httpx.get(f"{root}/metrics").text
        asked = len(engine.requests)
        time.sleep(0.2)
        assert len(engine.requests) == asked  # no line is answered before its answer can be written
        disk.full = False
        done = until(
            lambda: (
                (one := httpx.get(f"{url}/batches/{batch}").json())["status"] == "completed" and one
            )
        )
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        rows = httpx.get(f"{url}/files/{done['output_file_id']}/content").text.splitlines()
        assert sorted(int(json.loads(row)["custom_id"]) for row in rows) == [*range(20)]
        until(lambda: "degraded" not in httpx.get(f"{root}/health").json())
        assert "esurge:batches_stalled 0.0" in httpx.get(f"{root}/metrics").text
        assert order(url, 1).status_code == 200


def test_upload_to_a_full_disk_returns_503_and_leaves_no_file(tmp_path, disk):
    with background(ScriptedEngine(), batch_directory=tmp_path) as url:
        disk.full = True
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", b"{}")}
        refused = httpx.post(f"{url}/files", files=form)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "storage_unavailable"
        assert not list((tmp_path / "files").iterdir())


def test_batch_without_its_file_fails_and_the_next_batch_runs(tmp_path, disk):
    engine = ScriptedEngine(lambda prompt, choice: "x", delay=0.01)
    with background(engine, batch_directory=tmp_path, limits={"batch_concurrency": 1}) as url:
        first = order(url, 50).json()
        second = order(url, 2).json()
        (tmp_path / "files" / f"{second['input_file_id']}.data").unlink()
        third = order(url, 2).json()
        httpx.post(f"{url}/batches/{first['id']}/cancel")

        def status(batch):
            return httpx.get(f"{url}/batches/{batch['id']}").json()["status"]

        until(lambda: status(third) == "completed")
        assert status(second) == "failed"


def test_batch_worker_restarts_after_an_unexpected_error(tmp_path, disk, monkeypatch):
    original, calls = BatchStore.list_unfinished, []

    def broken(self):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a defect of the worker")
        return original(self)

    monkeypatch.setattr(BatchStore, "list_unfinished", broken)
    with background(ScriptedEngine(), batch_directory=tmp_path) as url:
        batch = order(url, 2).json()["id"]
        until(lambda: httpx.get(f"{url}/batches/{batch}").json()["status"] == "completed")


def test_incomplete_write_of_a_line_is_rolled_back(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    with stores.open_private(path, "ab") as file:
        _append(file, b'{"id": "x_1"}\n')

        class Full:
            def fileno(self):
                return file.fileno()

            def write(self, rest):
                if len(rest) < 10:
                    raise OSError(errno.ENOSPC, "full")
                return file.write(rest[:5])

        with pytest.raises(OSError, match="full"):
            _append(Full(), b'{"id": "x_22222"}\n')
    assert path.read_bytes() == b'{"id": "x_1"}\n'
    path.write_bytes(path.read_bytes() + b'{"id": "x_3"')
    assert _read_line_numbers(path) == {1}
    assert path.read_bytes() == b'{"id": "x_1"}\n'


def test_failed_write_leaves_the_batch_unchanged(tmp_path, disk):
    store = BatchStore(tmp_path, ServerLimits())
    part = store.part()
    part.write_bytes(b"{}")
    file = store.add_file("in", "batch", part, "")
    batch = store.add_batch(file["id"], "/v1/completions", None, "")
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        store.change(batch, "in_progress")
    assert batch["status"] == "validating"
    with pytest.raises(OSError, match="No space left"):
        store.add_batch(file["id"], "/v1/completions", None, "")
    assert len(store.batches("")) == 1


def test_files_of_prompts_and_answers_are_private(tmp_path):
    before = os.umask(0)
    try:
        with background(ScriptedEngine(), batch_directory=tmp_path / "new") as url:
            batch = order(url, 2).json()["id"]
            until(lambda: httpx.get(f"{url}/batches/{batch}").json()["status"] == "completed")
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in ((tmp_path / "new"), *(tmp_path / "new").rglob("*"))
    }
    assert len(modes) > 6
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
