"""Files and batches: every line has an answer, also after a restart, and only for its owner."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time

import httpx
import openai
import pytest
from ed_esurge.command.run_batch import answer_lines
from ed_esurge.server import create_app, stores
from ed_esurge.server.batches import worker
from ed_esurge.server.generation import answers
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def line(name, body=CHAT, url="/v1/chat/completions", **more):
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more})


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def over(client, batch):
    """Return the batch after it has ended."""
    ended = ("completed", "failed", "cancelled", "expired")
    return until(lambda: (one := client.batches.retrieve(batch)).status in ended and one)


def rows(client, file):
    return [json.loads(row) for row in client.files.content(file).text.splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    limits = {"max_batch_requests": 20, "max_file_bytes": 20_000, "max_files": 30}
    limits |= {"max_body_bytes": 4096}
    with background(
        ScriptedEngine(lambda prompt, choice: "fine"),
        batch_directory=folder,
        limits=limits,
        api_key=["ann", "bob"],
    ) as url:
        yield url


def client_of(url, key="ann"):
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def put(client, *lines):
    data = "\n".join(lines).encode()
    return client.files.create(file=("in.jsonl", data), purpose="batch")


def run(client, *lines, **options):
    options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **options}
    return client.batches.create(input_file_id=put(client, *lines).id, **options)


def test_invalid_batch_line_does_not_affect_other_lines(served):
    client = client_of(served)
    bad = {
        "json": '{"custom_id": ',
        "list": "[1]",
        "unknown": line("unknown", {**CHAT, "temperature": "hot"}),
        "model": line("model", {**CHAT, "model": "other"}),
        "stream": line("stream", {**CHAT, "stream": True}),
        "url": line("url", {"prompt": "a"}, "/v1/completions"),
        "twice": line("one"),
        "none": line(""),
        "long": line("long", {**CHAT, "user": "x" * 5000}),
    }
    lines = [line("one"), *bad.values(), "", line("two", {**CHAT, "n": 2})]
    batch = run(client, *lines, metadata={"for": "a test"})
    assert (batch.status, batch.metadata) == ("validating", {"for": "a test"})
    done = over(client, batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (11, 2, 9)
    good = {row["custom_id"]: row for row in rows(client, done.output_file_id)}
    assert set(good) == {"one", "two"}
    for row in good.values():
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        whole = answers.ChatCompletion.model_validate(row["response"]["body"])
        assert whole.choices[0].message.content == "fine"
    assert len(good["two"]["response"]["body"]["choices"]) == 2
    failed = rows(client, done.error_file_id)
    codes = [row["error"]["code"] for row in failed if row["error"]]
    assert sorted(codes) == [
        "duplicate_custom_id",
        "invalid_json",
        "invalid_json",
        "invalid_url",
        "invalid_value",
        "invalid_value",
        "request_too_large",
    ]
    answered = {row["custom_id"]: row["response"] for row in failed if row["response"]}
    assert answered["unknown"]["status_code"] == 400
    assert answered["model"]["body"]["error"]["code"] == "model_not_found"
    assert len({row["id"] for row in [*good.values(), *failed]}) == 11


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_batches_run_requests_for_every_endpoint(served, endpoint, body):
    client = client_of(served)
    done = over(client, run(client, line("a", body, endpoint), endpoint=endpoint).id)
    (row,) = rows(client, done.output_file_id)
    assert row["response"]["body"]["model"] == "scripted"


def test_files_can_be_uploaded_listed_and_deleted(served):
    client, other = client_of(served), client_of(served, "bob")
    file = put(client, line("a"))
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len(line("a")))
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).text == line("a")
    assert file.id in [one.id for one in client.files.list()]
    # Objects of other keys are not found.
    assert not list(other.files.list())
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    over(client, run(client, line("a")).id)
    batch = run(client, line("a"))
    with pytest.raises(openai.NotFoundError):
        other.batches.retrieve(batch.id)
    assert not list(other.batches.list())
    newest = client.batches.list(limit=1)
    assert [one.id for one in newest.data] == [batch.id] and newest.has_more
    over(client, batch.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_files_beyond_the_limits_of_size_and_number_are_rejected(served):
    client = client_of(served)
    with pytest.raises(openai.APIStatusError) as caught:
        put(client, "x" * 20_001)
    assert caught.value.status_code == 413
    bob = client_of(served, "bob")
    for _ in range(30):
        put(bob, "x")
    with pytest.raises(openai.RateLimitError):
        put(bob, "x")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a", b"b"), purpose="assistants")


def test_batch_with_more_lines_than_the_limit_fails(served):
    client = client_of(served)
    done = over(client, run(client, *[line(str(place)) for place in range(21)]).id)
    assert done.status == "failed"
    assert "21 lines" in done.errors.data[0].message


def test_malformed_uploads_and_queries_return_400(served):
    kind = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": "Bearer ann"}
    for body in (
        b"",
        b"--x",
        b"--x--",
        b"--x\r\n",
        b"\r\n--x\r\n\r\n\r\n--x--",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\na',
    ):
        answer = httpx.post(f"{served}/files", content=body, headers=kind)
        assert answer.status_code == 400, answer.text
    assert httpx.get(f"{served}/files?limit=x", headers=kind).status_code == 400


def test_server_without_batch_directory_has_no_batches():
    with background(ScriptedEngine()) as url:
        answer = httpx.get(f"{url}/batches")
        assert (answer.status_code, "batch_directory" in answer.text) == (404, True)


def test_interrupted_batch_continues_after_restart(tmp_path):
    """Each line is answered once: some by the stopped server, the others by the next server."""
    lines = [line(f"line {place}") for place in range(60)]
    first = ScriptedEngine(lambda prompt, choice: "x" * 8, delay=0.02)
    options = {"batch_directory": tmp_path, "limits": {"batch_concurrency": 2}}
    with background(first, drain_seconds=0, **options) as url:
        client = client_of(url)
        batch = run(client, *lines).id
        until(lambda: client.batches.retrieve(batch).request_counts.completed >= 3)
    (part,) = (tmp_path / "batches").glob("*.ok")
    whole = part.read_bytes()
    begun = [json.loads(row)["custom_id"] for row in whole.splitlines()]
    assert 3 <= len(begun) < 60
    part.write_bytes(whole + b'{"id": "cut off in the mid')
    second = ScriptedEngine(lambda prompt, choice: "y")
    with background(second, **options) as url:
        client = client_of(url)
        done = over(client, batch)
        assert done.request_counts.completed == 60
        ids = [row["custom_id"] for row in rows(client, done.output_file_id)]
        assert sorted(ids) == sorted(f"line {place}" for place in range(60))
        assert ids[: len(begun)] == begun
        assert len(second.requests) == 60 - len(begun)


SLOW_SERVER = """
import sys, time
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

engine = ScriptedEngine(lambda prompt, choice: "x" * 200, delay=0.05)
limits = {"batch_concurrency": 2}
with background(engine, batch_directory=sys.argv[1], limits=limits) as url:
    print(url, flush=True)
    time.sleep(60)
"""


@pytest.mark.nightly
def test_line_in_progress_at_process_death_fails_without_retry(tmp_path):
    slow = {**CHAT, "max_tokens": 200}
    lines = [line("quick"), *(line(name, slow) for name in ("slow", "slow too")), line("last")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        client = client_of(process.stdout.readline().strip())
        batch = run(client, *lines).id
        # The first line is answered, and the next two are in progress.
        until(lambda: client.batches.retrieve(batch).request_counts.completed == 1)
        (marks,) = (tmp_path / "batches").glob("*.started")
        until(lambda: len(marks.read_text().splitlines()) == 3)
    finally:
        process.kill()
        process.wait()
    engine = ScriptedEngine(lambda prompt, choice: "fine")
    with background(engine, batch_directory=tmp_path) as url:
        client = client_of(url)
        done = over(client, batch)
        counts = done.request_counts
        assert (done.status, counts.completed, counts.failed) == ("completed", 2, 2)
        answered = [row["custom_id"] for row in rows(client, done.output_file_id)]
        assert answered == ["quick", "last"]
        failed = {row["custom_id"]: row["error"] for row in rows(client, done.error_file_id)}
        assert failed.keys() == {"slow", "slow too"}
        for error in failed.values():
            assert error["code"] == "server_died"
            assert "the process of the server died" in error["message"]
        assert len(engine.requests) == 1
        assert not marks.exists()


def test_cancelled_batch_keeps_finished_answers(tmp_path):
    engine = ScriptedEngine(lambda prompt, choice: "x" * 20, delay=0.02)
    options = {"batch_directory": tmp_path, "limits": {"batch_concurrency": 1}}
    with background(engine, **options) as url:
        client = client_of(url)
        batch = run(client, *[line(str(place), {**CHAT, "max_tokens": 20}) for place in range(99)])
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        assert client.batches.cancel(batch.id).status == "cancelling"
        done = over(client, batch.id)
        assert done.status == "cancelled"
        assert 0 < len(rows(client, done.output_file_id)) == done.request_counts.completed < 99


@pytest.mark.nightly
def test_unfinished_batch_requests_expire_after_window(tmp_path, monkeypatch):
    """Finished answers are kept, running lines are aborted, and other lines are never started. The
    same applies to a batch that expires while the server is down."""
    monkeypatch.setattr(stores, "DAY", 3)
    engine = ScriptedEngine(lambda prompt, _: "x" * 200 if len(prompt) > 9 else "x", delay=0.05)
    texts = {"quick": "a", "slow": "a" * 20}
    ask = {kind: {"prompt": text, "max_tokens": 200} for kind, text in texts.items()}
    lines = [line(kind, ask[kind], "/v1/completions") for kind in texts]
    lines += [line(str(place), ask["quick"], "/v1/completions") for place in range(40)] + ["{"]
    options = {"batch_directory": tmp_path, "limits": {"batch_concurrency": 1}}
    with background(engine, **options) as url:
        client = client_of(url)
        time.sleep(1 - time.time() % 1)  # both batches are created in the same second
        batch = run(client, *lines, endpoint="/v1/completions")
        assert batch.expires_at == batch.created_at + 3
        waiting = run(client, *lines[:3], endpoint="/v1/completions")
        done = over(client, batch.id)
        assert (done.status, done.completed_at) == ("expired", None)
        assert done.created_at + 3 <= done.expired_at
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (43, 1, 42)
        assert [row["custom_id"] for row in rows(client, done.output_file_id)] == ["quick"]
        failed = rows(client, done.error_file_id)
        assert {row["error"]["code"] for row in failed} == {"batch_expired"}
        assert [row["response"] for row in failed] == [None] * 42
        asked = ["slow", *map(str, range(40)), None]
        assert sorted(row["custom_id"] or "" for row in failed) == sorted(
            one or "" for one in asked
        )
        assert len(engine.requests) == 2
        assert len(engine.aborted) == 1
        # The other batch was running for the entire window.
        after = over(client, waiting.id)
        assert (after.status, after.request_counts.failed) == ("expired", 3)
        assert after.output_file_id is None


def test_batch_of_a_sleeping_engine_expires_after_its_window(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "DAY", 1)
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.05)
    engine = ScriptedEngine()
    engine.is_sleeping = True
    with background(engine, batch_directory=tmp_path) as url:
        client = client_of(url)
        done = over(client, run(client, line("a"), line("b")).id)
        assert (done.status, done.output_file_id) == ("expired", None)
        codes = [row["error"]["code"] for row in rows(client, done.error_file_id)]
        assert codes == ["batch_expired"] * 2


def test_command_answers_batch_lines_in_order():
    """The command without a server: the same answers, for several models in one file."""
    engines = {
        name: ScriptedEngine(lambda prompt, choice, name=name: name, delay=delay)
        for name, delay in (("slow", 0.01), ("fast", 0.0))
    }
    bodies = [{**CHAT, "model": name, "max_tokens": 8} for name in ("slow", "fast", "none")]
    lines = [line(str(place), bodies[place % 3]) for place in range(9)]
    lines += ["{", line("last", {"prompt": "a", "model": "fast"}, "/v1/completions")]
    to = io.BytesIO()
    server = create_app(engines).state.server
    source = io.BytesIO("\n".join(lines).encode())
    counts = asyncio.run(answer_lines(server, source, to, 4))
    written = [json.loads(row) for row in to.getvalue().splitlines()]
    assert counts == (7, 4)
    assert [row["custom_id"] for row in written] == [*map(str, range(9)), None, "last"]
    texts = [row["response"]["body"]["choices"][0]["message"]["content"] for row in written[:2]]
    assert texts == ["slow", "fast"]
    assert written[2]["response"]["status_code"] == 404
    assert written[9]["error"]["code"] == "invalid_json"
