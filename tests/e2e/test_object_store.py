"""A run whose rows and copies of checkpoints are on a local S3 server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

moto = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

RUN = """\
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
  tokenizer: {train: {vocab_size: 300}}
mixture:
  informs: [{type: json, data_files: "s3://store/rows/*.jsonl", content_field: text}]
  cache_dir: cache
  pack_tokens: true
  pack_seq_length: 32
trainer: {trainer_type: sft, total_batch_size: 4, max_training_steps: 12, log_steps: 1,
  save_steps: 4, save_directory: runs/s3, mirror_address: "s3://store/runs/s3"}
actions: [train]
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of a local S3 server with an empty bucket `store`."""
    server = moto.ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XLA_FLAGS": "",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        # Servers of one process share their buckets.
        reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset, timeout=30).close()
        s3fs.S3FileSystem().mkdir("store")
        yield {**os.environ, **variables}
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def test_copies_are_written_to_existing_buckets_only(
    environment: dict[str, str], tmp_path: Path
) -> None:
    from ed_trainers.checkpoints.mirror import Mirror
    from ed_trainers.stored import checksums

    checkpoint = tmp_path / "checkpoints/3"
    checkpoint.mkdir(parents=True)
    checkpoint.joinpath("data").write_bytes(bytes(100))
    checksums.write_checksums(checkpoint)
    for bucket, works in (("store", True), ("missing", False)):
        mirror = Mirror(f"s3://{bucket}/run", "metrics.jsonl", print)
        mirror.push(checkpoint, set)
        mirror.wait()
        assert (mirror.failed is None) == works
        assert mirror.fetch(tmp_path / bucket / "checkpoints") == int(works)
    assert not s3fs.S3FileSystem().exists("missing")


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_run_reads_rows_from_s3_and_continues_from_its_copies(
    environment: dict[str, str], tmp_path: Path
) -> None:
    fs = s3fs.S3FileSystem()
    lines = [json.dumps({"text": f"row {n} of the store " * 8}) for n in range(100)]
    fs.pipe_file("store/rows/a.jsonl", "\n".join(lines[:50]).encode())
    fs.pipe_file("store/rows/b.jsonl", "\n".join(lines[50:]).encode())
    (tmp_path / "run.yaml").write_text(RUN)
    words = [str(Path(sys.executable).parent / "elarge"), "run.yaml"]

    def run() -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "checkpoint 12 was copied to s3://store/runs/s3" in run()
    expected = losses(tmp_path / "runs/s3")
    assert [*expected] == [*range(1, 13)]
    fs.invalidate_cache()
    assert sorted(int(path.rpartition("/")[2]) for path in fs.ls("store/runs/s3")) == [4, 8, 12]
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))

    # A new machine: the newest copy is gone, the one before it was interrupted.
    shutil.rmtree(tmp_path / "runs")
    fs.rm("store/runs/s3/12", recursive=True)
    fs.rm_file("store/runs/s3/8/checksums.json")
    out = run()
    assert "checkpoint 4 was read from s3://store/runs/s3" in out
    assert "resumed from step 4 of 12" in out
    assert losses(tmp_path / "runs/s3") == expected
