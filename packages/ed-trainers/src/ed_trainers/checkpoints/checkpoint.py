"""Checkpoints of a run: the complete input of the next step, written atomically.

A checkpoint is a directory `<save_directory>/checkpoints/<step>` with two items: `arrays` (the
leaves of the state by name, which orbax writes in the background and can restore onto another mesh)
and `run` (JSON: the version of the format, the loader's position and fingerprint, the arguments),
and the checksums of their files. Orbax writes to a temporary name and renames at the end, so a
partial directory after a crash is never read as a checkpoint.

A checkpoint contains fingerprints instead of the weights that no step changes. A run over frozen
weights can therefore only resume over the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from ed_infra.errors import CheckpointError

from ed_trainers.checkpoints.mirror import Mirror
from ed_trainers.checkpoints.run_record import compare_runs, free_name
from ed_trainers.state import EasyDeLState, changing
from ed_trainers.stored import checksums, disk, library_log
from ed_trainers.stored.arrays import (
    check_fit,
    count_bytes,
    flat_abstract,
    flat_arrays,
    from_flat,
    read_arrays,
    stored_arrays,
)
from ed_trainers.stored.fingerprint import Fingerprint, check_same, fingerprint_arrays
from ed_trainers.stored.saved import FORMAT, check_format

# Files that orbax writes after `_seal`, while it commits a checkpoint.
_LATER = ("_CHECKPOINT_METADATA", "commit_success.txt")
# Approximate size of a checkpoint without its arrays, in bytes.
_OVERHEAD = 100_000
_UNFINISHED = ".orbax-checkpoint-tmp"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: directory of the checkpoints; created with the first checkpoint.
        keep: number of newest checkpoints to keep; None keeps all.
        keep_best: number of best checkpoints to keep in addition.
        score: returns the score of a step's checkpoint (larger is better), or None.
        say: prints a message.
        mirror: copies complete checkpoints to an object store.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None,
        keep_best: int = 0,
        score: Callable[[int], float | None] = lambda step: None,
        say: Callable[[str], None] = print,
        mirror: Mirror | None = None,
    ):
        self.directory = directory.absolute()
        #: The error of the last checkpoint; None if it was written.
        self.failed: str | None = None
        self._say = say
        self._score = score
        self._keep, self._keep_best = keep, keep_best
        self._mirror = mirror
        self._begun: tuple[int, int] | None = None  # step and bytes
        self._base: Fingerprint | None = None
        self._hush = library_log.Hush()
        self._open_manager: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._open_manager is None:
            self._hush.begin()
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open_manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    "arrays": ocp.StandardCheckpointHandler(),
                    "run": ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self,
                    cleanup_tmp_directories=True,
                    enable_async_checkpointing=True,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
                ),
            )
        return self._open_manager

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps()) if self.directory.is_dir() else []

    def best(self) -> int | None:
        """Return the step of the complete checkpoint with the highest score, or None."""
        return next(iter(self._rank_steps(self.steps())), None)

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.directory / str(step)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Select the checkpoints to keep; orbax calls this function after each write."""
        del context
        steps = [info.step for info in checkpoints]
        stay = self.select_kept_steps(steps)
        if self._mirror is not None:
            stay |= self._mirror.pending()
        return [step in stay for step in steps]

    def select_kept_steps(self, steps: Sequence[int]) -> set[int]:
        """Return the steps whose checkpoints stay."""
        stay = set(steps if self._keep is None else sorted(steps)[-self._keep :])
        return stay | set(self._rank_steps(steps)[: self._keep_best])

    def _rank_steps(self, steps: Sequence[int]) -> list[int]:
        scores = {step: self._score(step) for step in sorted(steps)}
        scored_steps = [(score, step) for step, score in scores.items() if score is not None]
        return [step for _, step in sorted(scored_steps, key=lambda pair: -pair[0])]

    def save(self, step: int, state: EasyDeLState, *, run: Mapping[str, Any]) -> bool:
        """Start to write a checkpoint, unless the step has one.

        Returns when the arrays are copied from the device; the write continues in the background
        until `wait`. The caller may donate the arrays of the state immediately. A full disk is
        reported, and recorded in `failed`; earlier checkpoints stay unchanged.

        Args:
            step: number of updates.
            state: the state to save.
            run: JSON values of the run; see `ed_trainers.checkpoints.run_record.describe_run`.

        Returns:
            Whether the write started.
        """
        self.wait()
        if step in self._manager.all_steps():
            return False
        self.failed = None
        arrays = flat_arrays(changing(state))
        frozen = _frozen(state, arrays)
        if self._base is None:
            self._base = fingerprint_arrays(frozen)
        facts = {"format": FORMAT, "base": self._base, **run}
        size = count_bytes(arrays.values())
        without = (
            f" ({disk.in_bytes(count_bytes(frozen.values()))} of frozen parameters are not saved)"
        )
        self._say(f"checkpoint {step}: {disk.in_bytes(size)}{without if frozen else ''}")
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), run=ocp.args.JsonSave(facts)
        )
        self._begun = step, size + _OVERHEAD
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._give_up(error)
            return False
        return True

    def wait(self) -> None:
        """Wait until every started checkpoint is complete or has failed."""
        if self._open_manager is not None:
            try:
                self._open_manager.wait_until_finished()
                self._seal_commit()
                if self._begun is not None and self._mirror is not None:
                    self._mirror.push(self.path(self._begun[0]), self.select_kept_steps)
            except Exception as error:
                self._give_up(error)
        self._begun = None

    def poll(self) -> None:
        """Read the outcome of the started checkpoint, without waiting."""
        if self._begun is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def close(self) -> None:
        """Wait, and end the threads."""
        self.wait()
        manager, self._open_manager = self._open_manager, None
        if manager is not None:
            manager.close()
        self._hush.end()

    def _seal(self) -> None:
        """Write the checksums of a checkpoint whose files are complete, before the rename."""
        assert self._begun is not None
        for directory in self.directory.glob(f"{self._begun[0]}{_UNFINISHED}*"):
            checksums.write_checksums(directory, skip=_LATER)

    def _seal_commit(self) -> None:
        """Add the checksums of the files that orbax wrote while it committed the checkpoint.

        The checkpoint is complete without these checksums, so an error is not a failure. After a
        full disk, these checksums are missing or damaged, and `restore_newest` reports damaged
        ones.
        """
        if self._begun is None or jax.process_index() != 0:
            return
        with suppress(OSError, ValueError):
            checksums.add_checksums(self.path(self._begun[0]), _LATER)

    def _give_up(self, error: Exception) -> None:
        """Remove a checkpoint that could not be written, and report the error.

        Raises:
            Exception: the error, unless the disk is full.
        """
        manager, self._open_manager = self._open_manager, None
        if manager is not None:
            with suppress(Exception):  # the manager cannot write any more; its threads must end
                manager.close()
        if self._begun is None or not disk.is_full(error):
            raise error
        step, size = self._begun
        self._hush.broke_off()
        if jax.process_index() == 0:
            for directory in self.directory.glob(f"{step}{_UNFINISHED}*"):
                shutil.rmtree(directory, ignore_errors=True)
        room = disk.room(self.directory, size)
        steps = self.steps()
        checkpoint_status = (
            f"checkpoint {steps[-1]} is intact" if steps else "there is no checkpoint yet"
        )
        self.failed = f"checkpoint {step} could not be written: {room}; {checkpoint_status}"
        self._say(self.failed)

    def restore_newest(
        self,
        state: EasyDeLState,
        *,
        run: Mapping[str, Any],
        difference: Callable[[Mapping[str, Any], int], str | None] = lambda loader, step: (
            "the data differ"
        ),
    ) -> tuple[int, EasyDeLState, dict[str, Any]] | None:
        """Read the newest undamaged checkpoint.

        A damaged checkpoint (a truncated or missing file, a flipped bit) is renamed, and the
        previous one is read.

        Args:
            state: structure, shapes, dtypes and shardings of the result, and the frozen weights.
                Mesh and storage of layers may differ from the checkpoint.
            run: the present run, which is compared with the run of the checkpoint.
            difference: describes the difference between the present data and the data of a saved
                loader state, if their fingerprints differ; see `compare_runs`.

        Returns:
            `(step, state, run of the checkpoint)`, or None without checkpoints.

        Raises:
            CheckpointError: an undamaged checkpoint belongs to another run, model or format, or all
                checkpoints are damaged.
        """
        steps = self.steps()
        unreadable: list[tuple[int, str]] = []
        for step in reversed(steps):
            location, arrays_there = str(self.path(step)), {}
            try:
                wrong = self._damage(step)
                saved = dict(self._read_run(step))
                if wrong is None or "format" not in saved:
                    check_format(saved, location)
                    arrays_there = stored_arrays(self.path(step) / "arrays")
            except CheckpointError:
                raise
            except Exception as error:  # orbax raises many types of errors for damaged files
                unreadable.append((step, _reason(error)))
                continue
            if wrong is not None:
                unreadable.append((step, wrong))
                continue
            changed = compare_runs(saved, run, location, difference, step)
            check_fit(flat_abstract(changing(state)), arrays_there, location, dtypes=True)
            self._check_base(state, saved, location)
            try:
                restored = self._arrays(step, state)
            except Exception as error:
                unreadable.append((step, _reason(error)))
                continue
            self._set_aside(unreadable, step)
            if changed is not None:
                self._say(changed)
            return step, restored, saved
        if steps:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read ("
                + "; ".join(f"{step}: {reason}" for step, reason in unreadable)
                + "): restore one from a copy, or start again with another save_directory"
            )
        return None

    def restore(self, step: int, state: EasyDeLState) -> EasyDeLState:
        """Read the checkpoint of a step of this run.

        Args:
            step: one of `steps()`.
            state: see `restore_newest`.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        self.wait()
        wrong = self._damage(step)
        if wrong is not None:
            raise CheckpointError(f"checkpoint {self.path(step)} is damaged: {wrong}")
        return self._arrays(step, state)

    def _arrays(self, step: int, state: EasyDeLState) -> EasyDeLState:
        abstract_arrays = flat_abstract(changing(state))
        arrays = read_arrays(self.path(step) / "arrays", abstract_arrays)
        return from_flat(state, {**_frozen(state, abstract_arrays), **arrays})

    def _read_run(self, step: int) -> Mapping[str, Any]:
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        return self._manager.restore(step, args=args)["run"]

    def _damage(self, step: int) -> str | None:
        """Describe the damage of a checkpoint's files, or return None; every process reads a share
        of the files."""
        part, of = jax.process_index(), jax.process_count()
        wrong = checksums.damage(self.path(step), part=part, of=of)
        if of > 1:
            from jax.experimental import multihost_utils

            bad = multihost_utils.process_allgather(np.asarray(wrong is not None))
            if bad.any() and wrong is None:
                wrong = f"process {int(bad.argmax())} reports the damaged file"
        return wrong

    def _check_base(self, state: EasyDeLState, saved: Mapping[str, Any], location: str) -> None:
        if self._base is None:
            self._base = fingerprint_arrays(_frozen(state, flat_abstract(changing(state))))
        check_same(saved["base"], self._base, location)

    def _set_aside(self, unreadable: list[tuple[int, str]], used: int) -> None:
        """Rename damaged checkpoints, so that their steps can be saved again."""
        for step, reason in unreadable:
            self._say(
                f"checkpoint {step} cannot be read and is skipped ({reason}): "
                f"checkpoint {used} is used"
            )
        if not unreadable:
            return
        self.close()
        if jax.process_index() == 0:
            for step, _ in unreadable:
                self.path(step).rename(free_name(self.directory, f"unreadable-{step}"))


def _frozen(state: EasyDeLState, saved: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the arrays of a state that are not saved."""
    return {name: leaf for name, leaf in flat_arrays(state).items() if name not in saved}


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
