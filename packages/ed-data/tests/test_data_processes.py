"""Several processes with one cache read complete files and the same batches."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import hashlib, sys, time
from transformers import AutoTokenizer
from ed_data import Mixture, build_loader
mixture = Mixture(
    informs=[{"type": "python", "data_files": "pydoc_data.topics:topics"}],
    cache_dir=sys.argv[1], pack_tokens=True, pack_seq_length=128, prefetch_workers=0,
)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
loader = build_loader(mixture, tokenizer, batch_size=4)
digest = hashlib.sha256()
for step in range(10):
    for name, values in sorted(loader.batch_at(step).items()):
        digest.update(values.tobytes())
print(digest.hexdigest(), flush=True)
"""


@pytest.mark.nightly
def test_concurrent_processes_write_one_token_store(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tok")
    command = [sys.executable, "-c", CODE, str(tmp_path / "cache"), str(tmp_path / "tok")]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:  # all start at the same time
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        digests = {process.communicate(timeout=120)[0] for process in running}
    finally:
        for process in running:
            process.kill()
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
    stores = list((tmp_path / "cache" / "tokens").iterdir())
    assert len(stores) == 1, "one complete store, and no partial stores"
