"""One run at a time writes to a directory and to a mirror; abandoned locks are taken over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ed_infra.errors import CheckpointError
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.checkpoints import run_lock
from ed_trainers.checkpoints.run_lock import LOCK_FILE, Owner, RunLock

#: Acquires a lock, prints a line, and keeps the lock until its input ends.
HOLDER = """
import os, sys, time
from pathlib import Path
from ed_trainers.checkpoints.run_lock import RunLock
if sys.argv[4:] == ["late"]:
    os.register_at_fork(after_in_child=lambda: time.sleep(1))
mirror, launch = (word if word != "-" else None for word in sys.argv[2:4])
lock = RunLock(Path(sys.argv[1]), mirror, launch=launch)
lock.acquire()
if sys.argv[4:]:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print("child", child, flush=True)
print("locked", flush=True)
sys.stdin.read()
lock.release()
"""


@contextlib.contextmanager
def holder(
    directory: Path, mirror: str = "-", launch: str = "-", *more: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has the lock."""
    command = [sys.executable, "-c", HOLDER, str(directory), mirror, launch, *more]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        line = ""
        while line != "locked\n":
            line = process.stdout.readline()
            assert line, "the process ended without the lock"
            if line.startswith("child"):
                process.child = int(line.split()[1])  # type: ignore[attr-defined]
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every wait for a renewal longer than a test may take."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1e6)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)


def acquire(directory: Path, mirror: str | None = None, launch: str | None = None) -> RunLock:
    lock = RunLock(directory, mirror, launch=launch, say=lambda text: None)
    lock.acquire()
    return lock


def foreign(**changes: object) -> Owner:
    """Return an owner on another host."""
    owner = dataclasses.replace(Owner.current(None), host="other-host", machine="another boot")
    return dataclasses.replace(owner, token="b" * 32, **changes)


def test_second_process_is_refused_and_names_the_first(tmp_path: Path, patient: None) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(CheckpointError, match=f"process {first.pid} on .* since .*save_direc"):
            acquire(tmp_path)
        second = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path), "-", "-"],
            input="",
            capture_output=True,
            text=True,
        )
        assert second.returncode != 0
        assert f"process {first.pid}" in second.stderr
        first.communicate("")
        assert first.returncode == 0
    assert not (tmp_path / LOCK_FILE).exists()
    acquire(tmp_path).release()


@pytest.mark.nightly
def test_killed_run_starts_again_at_once(tmp_path: Path, patient: None) -> None:
    mirror = f"file://{tmp_path}/mirror"
    with holder(tmp_path / "run", mirror) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / "run" / LOCK_FILE).exists() and (
            tmp_path / "mirror" / LOCK_FILE
        ).exists()
        acquire(tmp_path / "run", mirror).release()
    assert (
        not (tmp_path / "run" / LOCK_FILE).exists()
        and not (tmp_path / "mirror" / LOCK_FILE).exists()
    )


@pytest.mark.parametrize("child_start", ["fork", "late"])
def test_child_that_outlives_a_killed_run_does_not_keep_the_lock(
    tmp_path: Path, patient: None, child_start: str
) -> None:
    with holder(tmp_path, "-", "-", child_start) as first:
        child = first.child  # type: ignore[attr-defined]
        try:
            first.kill()
            first.wait()
            os.kill(child, 0)
            acquire(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_runs_with_one_mirror_are_refused(tmp_path: Path, patient: None) -> None:
    mirror = f"file://{tmp_path}/mirror"
    with holder(tmp_path / "a", mirror) as first:
        with pytest.raises(CheckpointError, match=f"process {first.pid}.*set another mirror_addr"):
            acquire(tmp_path / "b", mirror)
        acquire(tmp_path / "b", f"file://{tmp_path}/other").release()


def test_two_runs_of_one_process_are_refused(tmp_path: Path, patient: None) -> None:
    lock = acquire(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()}"):
        acquire(tmp_path)
    lock.release()
    acquire(tmp_path).release()


@pytest.mark.parametrize("since", ["1970-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"])
@pytest.mark.parametrize("place", ["directory", "mirror"])
def test_renewals_and_not_clocks_decide_about_locks_of_other_hosts(
    tmp_path: Path, hasty: None, place: str, since: str
) -> None:
    folder = tmp_path / place
    folder.mkdir()
    file = folder / LOCK_FILE
    owner = foreign(since=since, pid=1)
    mirror = f"file://{folder}" if place == "mirror" else None
    directory = tmp_path / "run" if mirror else folder
    file.write_bytes(owner.content(0))
    os.utime(file, (0, 0))
    end = threading.Event()

    def renew() -> None:
        beat = 0
        while not end.wait(0.05):
            beat += 1
            file.write_bytes(owner.content(beat))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="process 1 on other-host"):
            acquire(directory, mirror)
    finally:
        end.set()
        thread.join()
    acquire(directory, mirror).release()
    assert not file.exists()


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff" * 100, b"[]", b'{"token": 1}', bytes(10)])
def test_damaged_locks_are_taken_over(tmp_path: Path, hasty: None, raw: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(raw)
    acquire(tmp_path).release()


def test_next_processes_of_an_elastic_launch_take_the_lock(tmp_path: Path, patient: None) -> None:
    (tmp_path / LOCK_FILE).write_bytes(foreign(launch="launch-7").content(3))
    acquire(tmp_path, launch="launch-7").release()
    with holder(tmp_path, "-", "launch-7") as first:
        ending = threading.Timer(0.5, first.kill)
        ending.start()
        acquire(tmp_path, launch="launch-7").release()
        ending.join()


def test_suspended_run_notices_that_another_run_took_the_lock(tmp_path: Path, hasty: None) -> None:
    lock = acquire(tmp_path)
    lock.check()
    other = foreign(pid=7)
    (tmp_path / LOCK_FILE).write_bytes(other.content(0))
    assert lock._thread is not None
    lock._thread.join()
    with pytest.raises(CheckpointError, match="process 7 on other-host"):
        lock.check()
    lock.release()
    assert Owner.parse((tmp_path / LOCK_FILE).read_bytes()) == other


def test_deleted_lock_of_a_run_is_written_again(tmp_path: Path, hasty: None) -> None:
    lock = acquire(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    renewed = threading.Event()
    while not (tmp_path / LOCK_FILE).exists():
        renewed.wait(0.05)
    with pytest.raises(CheckpointError, match="another run"):
        acquire(tmp_path)
    lock.release()


def test_locks_of_object_stores_are_created_once(patient: None, tmp_path: Path) -> None:
    mirror = f"memory://locks-{os.getpid()}"
    lock = acquire(tmp_path / "a", mirror)
    place = run_lock.StorePlace(mirror)
    assert not place.create(foreign().content(0))
    found = Owner.parse(place.read() or b"")
    assert found is not None and found.pid == os.getpid()
    lock.release()
    assert place.read() is None and place.create(foreign().content(0))
    place.remove()


def test_store_without_conditions_has_the_last_writer_as_owner(
    tmp_path: Path, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_ATOMIC", set())
    mirror = f"memory://last-{os.getpid()}"
    create = run_lock.StorePlace.create

    def create_twice(place: run_lock.StorePlace, raw: bytes) -> bool:
        created = create(place, raw)
        place.write(foreign(pid=5).content(0))
        return created

    monkeypatch.setattr(run_lock.StorePlace, "create", create_twice)
    with pytest.raises(CheckpointError, match="process 5 on other-host"):
        acquire(tmp_path, mirror)


def test_store_that_cannot_be_locked_is_reported(tmp_path: Path, hasty: None) -> None:
    (tmp_path / "file").write_text("no folder")
    messages: list[str] = []
    lock = RunLock(tmp_path / "run", f"file://{tmp_path}/file/mirror", say=messages.append)
    lock.acquire()
    lock.release()
    assert "would not be noticed" in messages[0]


def test_full_disk_does_not_release_the_lock(
    tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 0.2)
    lock = acquire(tmp_path)
    with pytest.raises(CheckpointError, match="another process"):
        acquire(tmp_path)
    lock.release()


SETTINGS = {
    "total_batch_size": 8,
    "max_training_steps": 2,
    "log_steps": 1,
    "save_steps": 1,
    "use_tensorboard": False,
}


@pytest.mark.daily("True")
@pytest.mark.parametrize("resumes", [True, False])
def test_trainer_changes_no_file_of_a_live_run(toy, tmp_path: Path, resumes: bool) -> None:
    """The temporary folder of a checkpoint that the live run is writing stays, too."""
    arguments = SFTArguments(save_directory=str(tmp_path), resume_if_possible=resumes, **SETTINGS)
    lock = acquire(tmp_path)
    unfinished = tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp-7"
    unfinished.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    trainer = SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader())
    with pytest.raises(CheckpointError, match=f"belongs to process {os.getpid()}"):
        trainer.train()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    lock.release()
    trainer.train()
    assert not (tmp_path / LOCK_FILE).exists()
    assert SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader()).train()


def test_run_that_lost_its_lock_saves_nothing_more(
    toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(lock: RunLock) -> None:
        raise CheckpointError("another run has the lock")

    monkeypatch.setattr(RunLock, "check", lose)
    arguments = SFTArguments(save_directory=str(tmp_path), **SETTINGS)
    with pytest.raises(CheckpointError, match="another run has the lock"):
        SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader()).train()
    assert not [*tmp_path.glob("checkpoints/*")]
