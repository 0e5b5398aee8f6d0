"""Faults of the disk under a checkpoint: flipped bits, lost and cut files, no room."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
import subprocess
from types import SimpleNamespace

import jax.numpy as jnp
import optax
import pytest
from ed_infra.errors import CheckpointError
from ed_trainers import Callback, SFTArguments, SFTTrainer
from ed_trainers.checkpoints.checkpoint import Checkpoints
from ed_trainers.checkpoints.run_record import describe_run
from ed_trainers.figures.metrics import MetricsLog, read_metrics
from ed_trainers.state import EasyDeLState
from ed_trainers.stored import checksums, disk

RUN = describe_run(SFTArguments(), total_steps=10, loader={}, fingerprint="x")


def state_of(toy, seed=0):
    return EasyDeLState.create(
        model=toy.model(seed=seed), tx=optax.adamw(1e-2), init_opt_state=True
    )


def written(toy, directory, steps=(1, 2)):
    checkpoints = Checkpoints(directory, keep=None, say=lambda message: None)
    state = state_of(toy)
    for step in steps:
        checkpoints.save(step, state.replace(step=jnp.int32(step)), run=RUN)
    checkpoints.close()


def restored(toy, directory):
    said = []
    checkpoints = Checkpoints(directory, keep=None, say=said.append)
    step, state, _ = checkpoints.restore_newest(state_of(toy, seed=1), run=RUN)
    checkpoints.close()
    return step, state, said


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.nightly
def test_a_bit_flipped_at_any_of_200_places_is_seen(toy, tmp_path):
    written(toy, tmp_path)
    step = tmp_path / "2"
    files = [file for file in step.rglob("*") if file.is_file()]
    arrays = [file for file in files if file.parent.name == "d"]
    others = [file for file in files if file.parent != step and file not in arrays]
    for group, count in ((arrays, 200), (others, 50)):
        places = [(file, bit) for file in group for bit in range(8 * file.stat().st_size)]
        for file, bit in random.Random(0).sample(places, count):
            flip(file, bit)
            name = file.relative_to(step).as_posix()
            assert (checksums.damage(step) or "").startswith(f"{name} has the checksum")
            flip(file, bit)
    assert checksums.damage(step) is None


def sixty_flips(directory, seed=0):
    """Flip single bits, of every file by turns, and yield each file while the bit is flipped."""
    rng = random.Random(seed)
    files = sorted(file for file in directory.rglob("*") if file.stat().st_size and file.is_file())
    assert {"_CHECKPOINT_METADATA", "commit_success.txt", checksums.CHECKSUMS_FILE} <= {
        f.name for f in files
    }
    for number in range(60):
        file = files[number % len(files)]
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        yield file, bit
        flip(file, bit)


def test_every_one_of_sixty_flipped_bits_is_noticed_in_any_file_of_a_checkpoint(toy, tmp_path):
    written(toy, tmp_path, steps=(1,))
    missed = [
        f"{file.name}, bit {bit}"
        for file, bit in sixty_flips(tmp_path / "1")
        if checksums.damage(tmp_path / "1") is None
    ]
    assert not missed
    assert checksums.damage(tmp_path / "1") is None


@pytest.mark.nightly
def test_each_of_sixty_flipped_bits_makes_a_run_resume_from_the_checkpoint_before(toy, tmp_path):
    written(toy, tmp_path / "whole")
    for _ in sixty_flips(tmp_path / "whole/2", seed=1):
        shutil.copytree(tmp_path / "whole", tmp_path / "copy")
        assert restored(toy, tmp_path / "copy")[0] == 1
        shutil.rmtree(tmp_path / "copy")
    assert restored(toy, tmp_path / "whole")[0] == 2


def test_every_bit_of_the_checksums_counts(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    checksums.write_checksums(tmp_path)
    file = tmp_path / checksums.CHECKSUMS_FILE
    for bit in range(8 * file.stat().st_size):
        flip(file, bit)
        assert checksums.damage(tmp_path) is not None, bit
        flip(file, bit)


def test_disk_that_is_full_after_the_commit_leaves_a_whole_checkpoint(toy, tmp_path, monkeypatch):
    def full(directory, names):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checksums, "add_checksums", full)
    written(toy, tmp_path)
    assert restored(toy, tmp_path)[0] == 2


def test_checkpoint_whose_process_ended_during_the_commit_is_read(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "_seal_commit", lambda self: None)
    written(toy, tmp_path)
    assert restored(toy, tmp_path)[0] == 2


def test_corrupt_checkpoint_falls_back_to_previous_with_one_message(toy, tmp_path):
    written(toy, tmp_path)
    file = max((tmp_path / "2/arrays").rglob("*"), key=lambda f: f.stat().st_size)
    flip(file, 4 * file.stat().st_size)
    step, state, said = restored(toy, tmp_path)
    assert step == int(state.step) == 1
    assert len(said) == 1
    name = file.relative_to(tmp_path / "2").as_posix()
    assert f"checkpoint 2 cannot be read and is skipped ({name} has the checksum" in said[0]
    assert said[0].endswith(": checkpoint 1 is used")


@pytest.mark.parametrize("act", ["flip", "remove", "empty"])
def test_damage_to_the_checksums_themselves_is_damage(toy, tmp_path, act):
    written(toy, tmp_path)
    file = tmp_path / "2" / checksums.CHECKSUMS_FILE
    if act == "flip":
        text = file.read_text()
        flip(file, 8 * (text.rindex('"') - 1))
    elif act == "remove":
        file.unlink()
    else:
        file.write_text("")
    assert restored(toy, tmp_path)[0] == 1


def test_checkpoint_of_other_format_raises_checkpoint_error(toy, tmp_path):
    written(toy, tmp_path, steps=(1,))
    metadata = next((tmp_path / "1/run").rglob("metadata"))
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "format": 99}))
    checksums.write_checksums(tmp_path / "1")
    with pytest.raises(CheckpointError, match=r"is in format 99, this version .* reads format 2"):
        restored(toy, tmp_path)


def test_a_saved_state_is_checked_too(toy, tmp_path):
    state = state_of(toy)
    state.save_state(tmp_path / "s")
    file = max((tmp_path / "s/arrays").rglob("*"), key=lambda f: f.stat().st_size)
    flip(file, 100)
    with pytest.raises(CheckpointError, match=r"is damaged: arrays/.* has the checksum"):
        state.load_state(tmp_path / "s")


def test_disk_full_errors_are_recognized():
    full = OSError(errno.ENOSPC, "No space left on device")
    library = ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")
    wrapped = RuntimeError("in the background")
    wrapped.__cause__ = full
    assert all(map(disk.is_full, (full, library, wrapped)))
    assert not disk.is_full(ValueError("no such thing"))
    assert [disk.in_bytes(n) for n in (812, 3.44e6, 2e12)] == ["812 B", "3.4 MB", "2.0 TB"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class Disk(Callback):
    """Fills the disk after the checkpoint of one step, and empties it before that of another.

    Checkpoints are written in the background: each ends before the disk changes under it.
    """

    def __init__(self, folder, full, free):
        self.file, self.full, self.free = folder / "filler", full, free

    def on_log(self, trainer, row):
        if row["step"] in (self.full + 1, self.free):
            trainer._loop.checkpoints.wait()
        if row["step"] == self.full + 1:
            left = shutil.disk_usage(self.file.parent).free
            self.file.write_bytes(b"x" * (left - 16384))
        if row["step"] == self.free:
            self.file.unlink()


def run(toy, folder, callbacks=(), **given):
    settings = {
        "save_directory": str(folder / "run"),
        "total_batch_size": 8,
        "max_training_steps": 12,
        "save_steps": 3,
        "save_total_limit": 2,
        "log_steps": 1,
        "use_tensorboard": False,
        **given,
    }
    trainer = SFTTrainer(SFTArguments(**settings), toy.model(), toy.loader(), callbacks=callbacks)
    return trainer.train()


QUIET = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@QUIET
def test_full_disk_skips_checkpoint_and_training_continues(toy, small_disk, capsys):
    output = run(toy, small_disk, [Disk(small_disk, full=3, free=8)])
    out = capsys.readouterr().out
    assert out.count("could not be written: the disk of") == 1
    line = next(line for line in out.splitlines() if "could not" in line)
    assert line.startswith("checkpoint 6 could not be written")
    assert " kB are needed, " in line
    assert "free some, or lower save_total_limit; checkpoint 3 is intact" in line
    assert output.checkpoint_path.name == "12"
    folder = small_disk / "run" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"9", "12"}
    assert [row["step"] for row in read_metrics(small_disk / "run/metrics.jsonl")] == list(
        range(1, 13)
    )


@QUIET
def test_a_disk_that_stays_full_ends_in_a_message_and_a_run_that_can_go_on(toy, small_disk):
    filler = Disk(small_disk, full=6, free=None)
    with pytest.raises(CheckpointError, match=r"checkpoint 12 could not be written.*checkpoint 6"):
        run(toy, small_disk, [filler], do_last_save=True)
    filler.file.unlink()
    output = run(toy, small_disk)
    assert output.checkpoint_path.name == "12"
    assert output.metrics["steps"] == 12


class Brim(Callback):
    """Fills the disk to its last byte at the row of one step, and empties it at that of another."""

    def __init__(self, folder, full, free=None):
        self.file, self.full, self.free = folder / "filler", full, free

    def on_log(self, trainer, row):
        if row["step"] == self.free:
            self.file.unlink()
        if row["step"] == self.full:
            trainer._loop.checkpoints.wait()
            with self.file.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 4096):
                    pass


@QUIET
def test_rows_of_metrics_wait_while_the_disk_is_full(toy, small_disk, capsys):
    words = {"note": "x" * 3000}  # so that a page of the disk holds one row
    brim = Brim(small_disk, full=4, free=9)
    log = MetricsLog(small_disk / "metrics.jsonl", active=True)
    log.restart(0)
    trainer = SimpleNamespace(_loop=SimpleNamespace(checkpoints=SimpleNamespace(wait=int)))
    for step in range(1, 13):
        log.write({"step": step, "loss": 1.0, **words})
        brim.on_log(trainer, {"step": step})
        if step == 8:
            log.flush()
            assert len(read_metrics(small_disk / "metrics.jsonl")) < 8
    log.close()
    assert [row["step"] for row in read_metrics(small_disk / "metrics.jsonl")] == list(range(1, 13))
    out = capsys.readouterr().out
    assert out.count("rows of metrics.jsonl wait until they can be written: the disk of") == 1


@pytest.mark.nightly
@QUIET
def test_a_model_that_a_full_disk_has_no_room_for_is_written_by_the_next_run(toy, small_disk):
    settings = {"save_steps": None, "max_training_steps": 4}
    brim = Brim(small_disk, full=4)

    class Late(Callback):
        """Fills the disk when the last checkpoint is complete."""

        def on_save(self, trainer, step):
            brim.on_log(trainer, {"step": 4})

    with pytest.raises(
        CheckpointError, match=r"the model could not be written .* is full.*run the"
    ):
        run(toy, small_disk, [Late()], **settings)
    brim.file.unlink()
    output = run(toy, small_disk, **settings)
    assert output.metrics["steps"] == 4
    assert (small_disk / "run/model/config.json").is_file()
