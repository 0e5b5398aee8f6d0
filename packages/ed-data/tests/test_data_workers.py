"""Worker processes: the same tokens and counts as without them, and clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.order import stream
from ed_data.rows.example import Example
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.parallel import Encoding, EncodingJob
from ed_data.tokens.processes import Workers


def same(first, second) -> bool:
    return all(np.array_equal(first[key], second[key]) for key in {**first, **second})


def test_worker_imports_no_heavy_modules():
    code = (
        "import sys, ed_data.tokens.worker; "
        "heavy = {'jax', 'transformers', 'datasets', 'tokenizers', 'numpy', 'torch', 'pydantic'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CHATS = [
    {"content": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "so " * i}]}
    for i in range(30)
]


@pytest.mark.daily("how0")
@pytest.mark.proves("mixture.tokenization.num_proc")
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"streaming": True}, marks=pytest.mark.nightly),
        pytest.param({"pack_on_the_fly": True}, marks=pytest.mark.nightly),
    ],
)
def test_worker_processes_produce_same_batches_and_statistics(
    mixture, tokenizer, tmp_path, monkeypatch, how
):
    """Tokens, order, and counts of dropped documents are equal."""
    monkeypatch.setattr(stream, "_ENCODED", 8)
    monkeypatch.setattr(stream, "WINDOW_DOCUMENTS", 20)
    monkeypatch.setattr(
        stream, "WINDOW_TOKENS", 300
    )  # windows end early, after other documents were read
    rows = [*CHATS[:9], {"content": 3}, *CHATS[9:20], {"content": None}, *CHATS[20:]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"batch_size": 7, "assistant_only_loss": True}
    inform = {"data_files": str(path), "on_error": "skip"}
    loaders = []
    for number, processes in enumerate((None, 2)):
        made = mixture(
            informs=[inform],
            tokenization={**options, "num_proc": processes},
            cache_dir=str(tmp_path / f"cache-{number}"),
            pack_seq_length=32,
            **how,
        )
        loaders.append(build_loader(made, tokenizer, batch_size=2))
    plain, shared = loaders
    try:
        for _ in range(12):
            assert same(next(plain), next(shared))
            assert plain.state_dict() == shared.state_dict()
        assert plain.stats == shared.stats
    finally:
        plain.close()
        shared.close()


@pytest.mark.nightly
def test_progress_bar_counts_documents(mixture, tokenizer, monkeypatch):
    shown: dict[str, object] = {"documents": 0}

    class Bar:
        def __init__(self, desc, unit, disable):
            shown.update(desc=desc, disable=disable)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            shown["closed"] = True

        def set_postfix_str(self, text, refresh):
            shown["text"] = text

        def update(self, count):
            shown["documents"] += count

    monkeypatch.setattr("ed_data.storage.prepare.tqdm", Bar)
    build_loader(mixture(tokenization={"num_proc": 1, "batch_size": 25}), tokenizer)
    assert shown["documents"] == 60
    assert shown["desc"] == "tokenize data"
    assert shown["disable"] is None, "silent without a terminal"
    assert str(shown["text"]).endswith("M tokens")
    assert shown["closed"]


@pytest.mark.nightly
def test_worker_processes_raise_errors_and_stop_on_close(tokenizer):
    encoding = Encoding(Encoder(tokenizer, True, 0, False, 4), 1)
    texts = [Example({"content": f"{i} sheep"}, {}, f"line {i}") for i in range(9)]
    wrong = Example({"content": [5, 10**6]}, {}, "line 9")
    assert [len(e.digests) for e in encoding.all(texts, "x", None)] == [4, 4, 1]
    with pytest.raises(DataError, match=r"line 9, content_field: token id 1000000"):
        list(encoding.map([EncodingJob([wrong], "x")]))
    workers = encoding._workers
    assert workers is not None
    (process,) = workers._all
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"num_proc: a worker process ended with code -9"):
        list(encoding.map([EncodingJob(texts, "x")]))
    assert next(encoding.map([EncodingJob(texts, "x")])).digests == [t.digest for t in texts]
    encoding.close()
    assert all(each.poll() is not None for each in workers._all)


PARENT = """
import os, time
from ed_data.tokens.processes import Workers
workers = Workers(time.sleep, 1, "num_proc")
future = workers.submit(600)
while not workers._all:
    time.sleep(0.01)
print(workers._all[0].pid, flush=True)
time.sleep(600)
"""


def test_worker_processes_end_with_their_parent():
    """Also if the parent is killed during work; its main module needs no guard."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.5)  # the worker has started the item, or is about to start
    parent.kill()
    parent.communicate()
    for _ in range(600):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{worker}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return  # ended, but not reaped
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker goes on alone")


def test_unpicklable_jobs_raise_data_error():
    workers: Workers = Workers(lambda item: item, 1, "num_proc")
    with pytest.raises(DataError, match=r"^num_proc: .* cannot be sent to the worker processes"):
        workers.submit(1).result()
    workers.close()
    workers = Workers(len, 1, "num_proc")
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        workers.submit(1).result()
    assert workers.submit("abc").result() == 3
    workers.close()
