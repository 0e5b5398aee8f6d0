"""Batches of keys take turns, and their results count against the storage of their owner."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from ed_esurge.config import ServerLimits
from ed_esurge.server.batches import lines, worker
from ed_esurge.server.batches.worker import LineSlots
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.launch import background
from ed_esurge.server.stores import BatchStore
from ed_esurge.testing import ScriptedEngine


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


class Key:
    """Requests of one API key."""

    def __init__(self, url, key=None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def order(self, count, **body):
        body = {"prompt": "a", "max_tokens": 8, **body}
        rows = [
            json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body})
            for i in range(count)
        ]
        form = {"purpose": (None, "batch"), "file": ("in.jsonl", "\n".join(rows).encode())}
        file = self.http.post("/files", files=form).json()["id"]
        fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return self.http.post("/batches", json=fields)

    def get(self, batch):
        return self.http.get(f"/batches/{batch}").json()

    def ended(self, batch):
        ends = ("completed", "failed", "expired", "cancelled")
        return until(lambda: (one := self.get(batch)) and one["status"] in ends and one)

    def rows(self, file):
        text = self.http.get(f"/files/{file}/content").text
        return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("body", [{"logprobs": 5}, {"max_tokens": 0}], ids=["answers", "errors"])
def test_results_beyond_the_storage_of_the_owner_end_the_batch(tmp_path, body):
    limits = {"max_stored_bytes": 2**16, "batch_concurrency": 4}
    with background(ScriptedEngine(), batch_directory=tmp_path, limits=limits) as url:
        key = Key(url)
        batch = key.ended(key.order(300, **body).json()["id"])
        assert batch["status"] == "failed"
        (error,) = batch["errors"]["data"]
        assert error["code"] == "storage_quota_exceeded"
        assert "65536 bytes (max_stored_bytes)" in error["message"]
        stored = sum(path.stat().st_size for path in (tmp_path / "files").glob("*.data"))
        assert 2**15 < stored <= 2**16
        assert not [*tmp_path.glob("batches/*.ok"), *tmp_path.glob("batches/*.failed")]
        counts = batch["request_counts"]
        name = batch["error_file_id"] if body.get("max_tokens") == 0 else batch["output_file_id"]
        assert len(key.rows(name)) == counts["completed"] + counts["failed"] < 300
        # The quota is free again after the files are deleted.
        for file in key.http.get("/files").json()["data"]:
            key.http.delete(f"/files/{file['id']}")
        assert key.ended(key.order(3).json()["id"])["status"] == "completed"


def test_running_results_count_in_uploads_and_after_a_restart(tmp_path):
    store = BatchStore(tmp_path, ServerLimits(max_stored_bytes=4096))
    part = store.part()
    part.write_bytes(b"x" * 1000)
    file = store.add_file("a", "batch", part, "a")
    batch = store.add_batch(file["id"], "/v1/completions", None, "a")
    assert store.add_output(batch, 3000)
    assert not store.add_output(batch, 97)
    with pytest.raises(APIError, match="4000 bytes, and 97 more"):
        store.check_room("a", 97)
    store.check_room("b", 4096)
    store.results(batch, True).write_bytes(b"y" * 2000)
    again = BatchStore(tmp_path, ServerLimits(max_stored_bytes=4096))
    assert again.used_bytes("a") == 3000
    again.change(again.batch(batch["id"], "a"), "completed")
    assert again.used_bytes("a") == 1000


def test_batch_without_room_for_its_files_is_rejected(tmp_path):
    limits = {"max_files": 2}
    with background(ScriptedEngine(), batch_directory=tmp_path, limits=limits) as url:
        key = Key(url)
        done = key.ended(key.order(1).json()["id"])
        assert done["status"] == "completed"
        fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
        fields["input_file_id"] = done["input_file_id"]
        refused = key.http.post("/batches", json=fields)
        assert refused.status_code == 429
        assert "has 2 files, the limit of this server (max_files)" in refused.text
        key.http.delete(f"/files/{done['output_file_id']}")
        assert key.http.post("/batches", json=fields).status_code == 200


def test_small_batch_of_another_key_ends_during_a_large_batch(tmp_path):
    engine = ScriptedEngine(lambda prompt, _: "x" * 8, delay=0.01)
    limits = {"batch_concurrency": 2}
    keys = ["first", "second"]
    options = {"batch_directory": tmp_path, "limits": limits, "api_key": keys}
    with background(engine, **options) as url:
        large, small = (Key(url, key) for key in keys)
        slow = large.order(2000).json()["id"]
        until(lambda: large.get(slow)["request_counts"]["completed"])
        quick = small.order(5).json()["id"]
        assert small.ended(quick)["status"] == "completed"
        assert large.get(slow)["status"] == "in_progress"
        large.http.post(f"/batches/{slow}/cancel")
        assert large.ended(slow)["status"] == "cancelled"


@pytest.mark.nightly
def test_turns_of_more_owners_than_run_together_end(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "MAX_OWNERS", 1)
    monkeypatch.setattr(worker, "TURN_SECONDS", 0.05)
    engine = ScriptedEngine(lambda prompt, _: "x" * 8, delay=0.01)
    keys = ["first", "second", "third"]
    with background(engine, batch_directory=tmp_path, api_key=keys) as url:
        owners = [Key(url, key) for key in keys]
        slow = owners[0].order(300).json()["id"]
        until(lambda: owners[0].get(slow)["request_counts"]["completed"])
        quick = [owner.order(3).json()["id"] for owner in owners[1:]]
        for owner, batch in zip(owners[1:], quick, strict=True):
            assert owner.ended(batch)["status"] == "completed"
        assert owners[0].get(slow)["status"] == "in_progress"
        done = owners[0].ended(slow)
        assert done["status"] == "completed"
        rows = owners[0].rows(done["output_file_id"])
        assert sorted(int(row["custom_id"]) for row in rows) == [*range(300)]


def test_free_slots_go_to_the_owner_with_the_fewest_running_lines():
    async def work():
        slots, order = LineSlots(4), []
        for _ in range(4):
            await slots.acquire("a")

        async def wait(owner):
            await slots.acquire(owner)
            order.append(owner)

        tasks = [asyncio.create_task(wait(owner)) for owner in ("a", "b", "b", "c")]
        await asyncio.sleep(0)
        tasks[3].cancel()
        for _ in range(3):
            slots.release("a")
            await asyncio.sleep(0)
        assert order == ["b", "b", "a"]
        waiting = asyncio.create_task(slots.acquire("d"))
        await asyncio.sleep(0)
        slots.release("a")
        waiting.cancel()  # after the slot was given
        await asyncio.gather(waiting, return_exceptions=True)
        await slots.acquire("e")
        assert slots._running == {"b": 2, "a": 1, "e": 1}

    asyncio.run(work())


def test_long_answers_in_batches_equal_short_ones(tmp_path, monkeypatch):
    with background(ScriptedEngine(), batch_directory=tmp_path) as url:
        key, rows = Key(url), []
        for limit in (2**30, 0):
            monkeypatch.setattr(lines, "LONG_BODY", limit)
            monkeypatch.setattr(worker, "LONG_BODY", limit)
            done = key.ended(key.order(3, logprobs=3, user="é").json()["id"])
            some = sorted(key.rows(done["output_file_id"]), key=lambda row: row["custom_id"])
            for row in some:
                body = row["response"]["body"]
                assert row["response"]["request_id"] == body["id"] and row["error"] is None
                row["id"] = row["response"]["request_id"] = body["id"] = body["created"] = None
            rows.append(some)
        assert rows[0] == rows[1] and len(rows[0]) == 3


@pytest.mark.nightly
def test_lines_beyond_the_bytes_in_flight_are_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "RETRY_SECONDS", 0.01)
    engine = ScriptedEngine(lambda prompt, _: "x" * 900, max_model_len=2**12)
    small = {"max_body_bytes": 2**14, "max_file_bytes": 2**14, "max_audio_bytes": 2**14}
    limits = {"max_bytes_in_flight": 2**20, "batch_concurrency": 4, **small}
    with background(engine, batch_directory=tmp_path, limits=limits) as url:
        key = Key(url)
        done = key.ended(key.order(8, logprobs=2, max_tokens=500).json()["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        assert len(engine.requests) > 8
