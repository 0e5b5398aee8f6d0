"""Copies of checkpoints on an object store: partial or damaged copies are never read."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.checkpoints.mirror import Mirror
from ed_trainers.figures.metrics import CLOCKED, read_metrics
from ed_trainers.stored import checksums

SETTINGS = {
    "total_batch_size": 8,
    "max_training_steps": 6,
    "log_steps": 1,
    "save_steps": 2,
    "use_tensorboard": False,
}


@pytest.fixture
def store():
    """A folder of an object store in memory, and its address."""
    fs = fsspec.filesystem("memory")
    yield fs, "memory://mirror"
    if fs.exists("/mirror"):
        fs.rm("/mirror", recursive=True)


def copies(fs):
    return sorted(int(path.rpartition("/")[2]) for path in fs.ls("/mirror", False))


def rows(directory):
    return [
        {name: value for name, value in row.items() if name not in CLOCKED}
        for row in read_metrics(directory / "metrics.jsonl")
    ]


def train(toy, directory, address, **given):
    arguments = SFTArguments(
        save_directory=str(directory), mirror_address=address, **{**SETTINGS, **given}
    )
    SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader()).train()


@pytest.mark.nightly
@pytest.mark.proves("mirror_address")
def test_a_run_on_a_new_machine_continues_from_the_newest_copy(toy, tmp_path, store, capsys):
    fs, address = store
    train(toy, tmp_path / "first", address)
    assert copies(fs) == [2, 4, 6]
    fs.rm("/mirror/6", recursive=True)
    fs.rm_file("/mirror/4/checksums.json")  # an upload that was interrupted
    capsys.readouterr()
    train(toy, tmp_path / "second", address, save_total_limit=1)
    assert "resumed from step 2 of 6" in capsys.readouterr().out
    assert rows(tmp_path / "second") == rows(tmp_path / "first")
    assert copies(fs) == [6]
    with pytest.raises(ConfigError, match=r"holds checkpoints of an earlier run \(steps 6\)"):
        train(toy, tmp_path / "third", address, resume_if_possible=False)


def checkpoint(directory, step):
    made = directory / "checkpoints" / str(step)
    (made / "arrays").mkdir(parents=True)
    (made / "arrays" / "data").write_bytes(bytes(range(256)))
    (made / "run").write_text("{}")
    checksums.write_checksums(made)
    return made


def pushed(directory, address, *steps):
    mirror = Mirror(address, "metrics.jsonl", print)
    for step in steps:
        mirror.push(checkpoint(directory, step), set)
    mirror.wait()
    return mirror


def test_every_damaged_copy_is_skipped(tmp_path, store, capsys):
    fs, address = store
    pushed(tmp_path, address, 1, 2)
    target = tmp_path / "other" / "checkpoints"
    whole = {path: fs.cat_file(path) for path in fs.find("/mirror/2")}
    for path, content in whole.items():
        if path.endswith("metrics.jsonl"):
            continue
        for damaged in (content[:-1], bytes([content[0] ^ 1]) + content[1:], None):
            if damaged is None:
                fs.rm_file(path)
            else:
                fs.pipe_file(path, damaged)
            shutil.rmtree(tmp_path / "other", ignore_errors=True)
            assert Mirror(address, "metrics.jsonl", print).fetch(target) == 1
            assert [found.name for found in target.iterdir()] == ["1"]
            fs.pipe_file(path, content)
    assert "is damaged and is not used" in capsys.readouterr().out
    # A newer local checkpoint stays.
    assert Mirror(address, "metrics.jsonl", print).fetch(target) == 1
    assert Mirror(address, "metrics.jsonl", print).fetch(target) == 0


def test_a_failed_copy_is_reported_and_leaves_no_complete_copy(tmp_path, store, monkeypatch):
    fs, address = store
    put = type(fs).put_file

    def truncating(self, source, target, **given):
        put(self, source, target, **given)
        if target.endswith("data"):
            self.pipe_file(target, b"")

    monkeypatch.setattr(type(fs), "put_file", truncating)
    mirror = pushed(tmp_path, address, 1)
    assert mirror.failed is not None and "has 0 bytes instead of 256" in mirror.failed
    assert Mirror(address, "metrics.jsonl", print).fetch(tmp_path / "other" / "checkpoints") == 0
    monkeypatch.undo()
    assert pushed(tmp_path / "again", address, 1).failed is None
    assert mirror.fetch(tmp_path / "other" / "checkpoints") == 1


def test_unknown_protocol_and_unreadable_store_are_errors(tmp_path, store, monkeypatch):
    fs, address = store
    with pytest.raises(ConfigError, match="mirror_address 'nosuch://a' cannot be opened"):
        Mirror("nosuch://a", "metrics.jsonl", print)

    def refused(self, path, detail=True, **given):
        raise PermissionError("access denied")

    monkeypatch.setattr(type(fs), "ls", refused)
    with pytest.raises(CheckpointError, match=r"cannot be read \(PermissionError: access denied\)"):
        Mirror(address, "metrics.jsonl", print).fetch(tmp_path / "checkpoints")


def fill_disk(monkeypatch, name, capacity):
    """Let files of one direction fail when they have more than `capacity` bytes together."""
    from fsspec.implementations.local import LocalFileSystem

    copy, used = getattr(LocalFileSystem, name), []

    def limited(fs, source, target, **more):
        content = Path(source).read_bytes()
        if sum(used) + len(content) > capacity[0]:
            Path(target).write_bytes(content[:10])
            raise OSError(28, "No space left on device")
        used.append(len(content))
        return copy(fs, source, target, **more)

    monkeypatch.setattr(LocalFileSystem, name, limited)


def test_mirror_that_fills_keeps_earlier_copies_and_no_partial_one(tmp_path, monkeypatch, capsys):
    store = tmp_path / "store"
    mirror = Mirror(f"file://{store}", "metrics.jsonl", print)
    every = lambda steps: set(steps)  # noqa: E731
    mirror.push(checkpoint(tmp_path / "run", 2), every)
    mirror.wait()
    capacity = [100]
    fill_disk(monkeypatch, "put_file", capacity)
    mirror.push(checkpoint(tmp_path / "run", 4), every)
    mirror.wait()
    assert mirror.failed is not None and "No space left" in mirror.failed
    assert [path.name for path in store.iterdir()] == ["2"]
    assert checksums.damage(tmp_path / "run/checkpoints/4") is None
    capacity[0] = 10**9
    mirror.push(checkpoint(tmp_path / "run", 6), every)
    mirror.wait()
    assert mirror.failed is None
    assert Mirror(f"file://{store}", "metrics.jsonl", print).fetch(tmp_path / "new/checkpoints")
    assert (tmp_path / "new/checkpoints/6").is_dir()


def test_disk_that_fills_during_a_download_keeps_no_part(tmp_path, monkeypatch):
    address = f"file://{tmp_path}/store"
    pushed_mirror = Mirror(address, "metrics.jsonl", print)
    pushed_mirror.push(checkpoint(tmp_path / "run", 2), set)
    pushed_mirror.wait()
    capacity = [100]
    fill_disk(monkeypatch, "get_file", capacity)
    with pytest.raises(CheckpointError, match="the disk is full; free space"):
        Mirror(address, "metrics.jsonl", print).fetch(tmp_path / "new/checkpoints")
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    capacity[0] = 10**9
    assert Mirror(address, "metrics.jsonl", print).fetch(tmp_path / "new/checkpoints") == 1
