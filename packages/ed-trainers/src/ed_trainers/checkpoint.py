"""Checkpoints of a run: everything that the next step depends on, written at once and atomically.

A checkpoint is a directory `<save_directory>/checkpoints/<step>` with two items: `arrays` (the
leaves of the state by name, written by orbax in the background, restorable onto another mesh) and
`run` (JSON: the loader's position and fingerprint, and the arguments). Orbax writes under another
name and renames at the end, so what a crash leaves half-written is not taken for a checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from ed_infra.errors import CheckpointError

from ed_trainers.base_arguments import TrainingArguments
from ed_trainers.state import EasyDeLState, check_fit, flat_abstract, flat_arrays, from_flat

#: Arguments that give another run, or another shape of optimizer state, when they change.
MUST_MATCH = (
    "trainer_type",
    "seed",
    "total_batch_size",
    "optimizer",
    "master_dtype",
    "trainable_rules",
)

# Arguments that change what is computed, though a changed run can still go on from the checkpoint.
_CHANGE_THE_COURSE = (
    "learning_rate",
    "learning_rate_end",
    "scheduler",
    "warmup_steps",
    "optimizer_kwargs",
    "weight_decay",
    "learning_rate_rules",
    "weight_decay_rules",
    "clip_grad",
    "gradient_accumulation_steps",
)

Say = Callable[[str], None]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: where they are; created when the first one is written.
        keep: how many of the newest to keep; None keeps all.
        say: where messages go.
    """

    def __init__(self, directory: Path, *, keep: int | None, say: Say = print):
        self.directory = directory.absolute()
        self._say = say
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        self._open_manager: ocp.CheckpointManager | None = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._open_manager is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open_manager = ocp.CheckpointManager(
                self.directory,
                item_handlers={
                    "arrays": ocp.StandardCheckpointHandler(),
                    "run": ocp.JsonCheckpointHandler(),
                },
                options=self._options,
            )
        return self._open_manager

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps()) if self.directory.is_dir() else []

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.directory / str(step)

    def save(self, step: int, state: EasyDeLState, *, run: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, unless the step has one already.

        Returns when the arrays are copied off the device; writing goes on in the background, and
        `wait` ends it. The caller may donate the state's arrays at once.

        Args:
            step: updates done.
            state: what to save.
            run: JSON values that go with it; see `describe_run`.
        """
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(flat_arrays(state)), run=ocp.args.JsonSave(dict(run))
        )
        self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Return when every checkpoint that was begun is complete."""
        if self._open_manager is not None:
            self._open_manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and give back threads."""
        if self._open_manager is not None:
            self._open_manager.wait_until_finished()
            self._open_manager.close()
            self._open_manager = None

    def restore_newest(
        self,
        state: EasyDeLState,
        *,
        run: Mapping[str, Any],
        difference: Callable[[Mapping[str, Any]], str] = lambda loader: "the data differ",
    ) -> tuple[int, EasyDeLState, dict[str, Any]] | None:
        """Read the newest checkpoint that is whole.

        One that cannot be read (a torn file, a lost one) is moved aside and the one before it is
        tried.

        Args:
            state: structure, shapes, dtypes and shardings to restore to; the mesh may be another
                than the one that the checkpoint was written on.
            run: the present run, to be compared with the one that wrote the checkpoint.
            difference: says, where fingerprints differ, how the present data differ from the data
                whose loader state was saved.

        Returns:
            `(step, state, run as it was saved)`, or None where there is no checkpoint.

        Raises:
            CheckpointError: a checkpoint is whole but of another run or model, or there are
                checkpoints and none can be read.
        """
        steps = self.steps()
        unreadable: list[tuple[int, Exception]] = []
        for step in reversed(steps):
            where = str(self.path(step))
            try:
                saved = dict(self._read(step, "run", ocp.args.JsonRestore()))
                arrays_there = self._manager.item_metadata(step)["arrays"].tree
            except Exception as error:  # whatever a torn file makes of orbax
                unreadable.append((step, error))
                continue
            self._compare(saved, run, where, difference)
            wanted = flat_abstract(state)
            check_fit(wanted, arrays_there, where, dtypes=True)
            try:
                arrays = self._read(step, "arrays", ocp.args.StandardRestore(wanted))
            except Exception as error:
                unreadable.append((step, error))
                continue
            self._set_aside(unreadable)
            return step, from_flat(state, arrays), saved
        if steps:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read ("
                + "; ".join(f"{step}: {_reason(error)}" for step, error in unreadable)
                + "): restore one from a copy, or start again with another save_directory"
            )
        return None

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    def _set_aside(self, unreadable: list[tuple[int, Exception]]) -> None:
        """Rename checkpoints that cannot be read, so that their steps can be saved again."""
        for step, error in unreadable:
            self._say(f"checkpoint {step} cannot be read and is skipped ({_reason(error)})")
        if not unreadable:
            return
        self.close()
        if jax.process_index() == 0:
            for step, _ in unreadable:
                self.path(step).rename(_free(self.directory, f"unreadable-{step}"))

    def _compare(
        self,
        saved: Mapping[str, Any],
        run: Mapping[str, Any],
        where: str,
        difference: Callable[[Mapping[str, Any]], str],
    ) -> None:
        before, now = saved["arguments"], run["arguments"]
        # A name that is missing is an option that did not exist when the checkpoint was written.
        changed_names = [name for name, value in before.items() if now.get(name) != value]
        for name in MUST_MATCH:
            if name in changed_names:
                raise CheckpointError(
                    f"{where} was trained with {name} {before[name]!r}, now it is "
                    f"{now.get(name)!r}: change it back, or take another save_directory "
                    "(resume_if_possible=False moves this run aside)"
                )
        if saved.get("fingerprint") != run.get("fingerprint"):
            raise CheckpointError(
                f"{where} was trained on other data than train_dataset now gives "
                f"({difference(saved['loader'])}): change it back, or take another save_directory "
                "(resume_if_possible=False moves this run aside)"
            )
        changed = [
            f"{name} {before[name]!r} -> {now.get(name)!r}"
            for name in _CHANGE_THE_COURSE
            if name in changed_names
        ]
        if saved.get("total_steps") != run.get("total_steps"):
            changed.append(f"total steps {saved.get('total_steps')} -> {run.get('total_steps')}")
        if changed:
            self._say(f"changed since that checkpoint: {', '.join(changed)}")


def describe_run(
    arguments: TrainingArguments,
    *,
    total_steps: int,
    loader: Mapping[str, Any],
    fingerprint: str | None,
) -> dict[str, Any]:
    """Return what a checkpoint says about its run, in JSON values.

    Args:
        arguments: all of them are recorded.
        total_steps: updates of the whole run.
        loader: the loader's `state_dict()`.
        fingerprint: identity of data and order, or None where the loader has none.
    """
    return {
        "arguments": arguments.model_dump(mode="json"),
        "total_steps": total_steps,
        "loader": dict(loader),
        "fingerprint": fingerprint,
    }


def move_aside(directory: Path, names: tuple[str, ...]) -> Path | None:
    """Move an earlier run's files into `<directory>/earlier-<n>`; None if there are none.

    Args:
        directory: the run's `save_directory`.
        names: files and folders in it that belong to a run.
    """
    present = [directory / name for name in names if (directory / name).exists()]
    if not present:
        return None
    target = _free(directory, "earlier")
    target.mkdir()
    for path in present:
        path.rename(target / path.name)
    return target


def _free(directory: Path, name: str) -> Path:
    """Return `<directory>/<name>-<n>` for the first n that is not taken."""
    return next(p for n in itertools.count(1) if not (p := directory / f"{name}-{n}").exists())


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
