"""Resuming after any batch, and after a kill at any stage of preparation."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from ed_data import build_loader, cache
from ed_data.order import stream
from ed_data.schema import PREFERENCE, TEXT
from ed_data.storage.background import BackgroundTokens

TEXTS = [f"{i} " + "sheep " * (i % 17) for i in range(230)]
PAIRS = [
    {"prompt": f"{i}? " * (i % 5), "chosen": "yes " * (i % 7), "rejected": "no"} for i in range(99)
]


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


@pytest.mark.daily("schema1-False")
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("schema", [TEXT, PREFERENCE])
def test_resume_after_each_of_200_batches_is_exact(
    mixture, tokenizer, monkeypatch, streaming, schema
):
    """Bit-equal with other numbers of workers and hosts, across windows and epochs."""
    for name in ("plan.WINDOW", "stream.WINDOW_DOCUMENTS"):
        monkeypatch.setattr(f"ed_data.order.{name}", 60)
    monkeypatch.setattr(stream, "_ENCODED", 16)
    rows = TEXTS if schema == TEXT else PAIRS
    made = mixture(rows, streaming=streaming, pack_seq_length=48)

    def fresh(workers: int):
        own = made.replace(prefetch_workers=workers)
        return build_loader(own, tokenizer, batch_size=3, schema=schema)

    loader = fresh(1)
    states, batches = [], []
    for _ in range(203):
        states.append(json.dumps(loader.state_dict()))
        batches.append(next(loader))
    loader.close()
    for step in range(200):
        again = fresh(int(step % 40 == 0))
        again.load_state_dict(json.loads(states[step]))
        if step % 2:  # one host of several
            rows = [step % 3, (step + 1) % 3][: 1 + step % 4 // 2]
            again = again.for_rows(rows)
            assert same(next(again), {name: v[rows] for name, v in batches[step].items()})
        else:
            assert same(next(again), batches[step])
        assert json.loads(json.dumps(again.state_dict())) == json.loads(states[step + 1])
        if step % 20 == 0:
            assert same(next(again), batches[step + 1])
        again.close()


# Other tests of this process may have started jax and its threads; the child does not use jax.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


def killed(monkeypatch, owner: object, name: str, call: int, work) -> None:
    """Run the work in a process that is killed with SIGKILL when it calls a function."""
    process = os.fork()
    if process == 0:
        signal.alarm(60)  # a lock that another thread held would never be released
        function, calls = getattr(owner, name), []

        def kill(*args, **options):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, kill)
        try:
            work()
        finally:
            os._exit(3)  # the function was called less often
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), f"{name} was not called {call} times: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.daily("*encode-3", "*rename-1", "os:-replace-1")
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        ("ed_data.tokens.encoder:Encoder", "encode", 1),
        ("ed_data.tokens.encoder:Encoder", "encode", 3),
        ("ed_data.storage.store:", "compute_digest", 1),
        ("pathlib:Path", "write_text", 1),
        ("pathlib:Path", "rename", 1),
        ("ed_data.storage.store:", "TokenStore", 1),
        ("ed_data.order.windows:", "pack", 1),
        ("ed_data.order.windows:", "pack", 3),
        ("os:", "replace", 1),
    ],
)
def test_killed_preparation_can_be_repeated_at_each_stage(
    mixture, tokenizer, tmp_path, monkeypatch, owner, name, call
):
    import pkgutil

    monkeypatch.setattr("ed_data.order.plan.WINDOW", 60)
    made = mixture(TEXTS, tokenization={"batch_size": 50})

    def work() -> list[dict[str, np.ndarray]]:
        loader = build_loader(made, tokenizer, batch_size=2)
        return [loader.batch_at(step) for step in range(loader.steps_per_epoch)]

    killed(monkeypatch, pkgutil.resolve_name(owner), name, call, work)
    batches = work()
    parts = list((tmp_path / "cache").rglob(".*.part"))
    assert parts == [], "what the killed process left is gone"
    reference = mixture(TEXTS, cache_dir=str(tmp_path / "other"))
    expected = build_loader(reference, tokenizer, batch_size=2)
    assert all(same(batch, expected.batch_at(step)) for step, batch in enumerate(batches))


@pytest.mark.daily("ed_data.storage.store:-compute_digest")
@pytest.mark.parametrize(
    ("owner", "name"),
    [("ed_data.storage.store:", "compute_digest"), ("ed_data.storage.store:", "TokenStore")],
)
def test_killed_background_writer_leaves_no_partial_store(
    mixture, tokenizer, tmp_path, monkeypatch, owner, name
):
    import pkgutil

    monkeypatch.setattr("ed_data.storage.prepare.BACKGROUND_BYTES", 0)
    made = mixture(TEXTS, tokenization={"batch_size": 50})

    def work() -> list[dict[str, np.ndarray]]:
        loader = build_loader(made, tokenizer, batch_size=2)
        batches = [loader.batch_at(step) for step in range(5)]
        for tokens in loader._order.tokens:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(tokens, BackgroundTokens):
                tokens._thread.join()
        return batches

    killed(monkeypatch, pkgutil.resolve_name(owner), name, 1, work)
    batches = work()
    assert list((tmp_path / "cache").rglob(".*.part")) == []
    reference = mixture(TEXTS, cache_dir=str(tmp_path / "other"), pack_on_the_fly=True)
    expected = build_loader(reference, tokenizer, batch_size=2)
    assert all(same(batch, expected.batch_at(step)) for step, batch in enumerate(batches))


def test_killed_download_leaves_no_partial_copy(tmp_path, monkeypatch):
    from pathlib import Path

    target = tmp_path / "copy" / "a.jsonl"

    def work() -> None:
        with cache.new_file(Path(target)) as part:
            part.write_text("half")
            os.getppid()

    killed(monkeypatch, os, "getppid", 1, work)
    assert len(list(target.parent.glob(".*.part"))) == 1
    cache.remove_abandoned(target.parent)
    assert list(target.parent.iterdir()) == []
