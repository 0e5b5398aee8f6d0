"""`CheckpointManager`: saved states in one directory, for custom training loops.

    manager = CheckpointManager("checkpoints")
    manager.save(state)
    state = manager.load(state)

The trainers use `ed_trainers.checkpoints.checkpoint`, which also saves the position in the data.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeVar, overload

import jax
from ed_infra import logging
from ed_infra.errors import CheckpointError
from flax import nnx

from ed_trainers.state import EasyDeLState
from ed_trainers.stored.arrays import flat_abstract, flat_arrays, from_flat
from ed_trainers.stored.saved import load_arrays, model_facts, save_arrays, saved_facts

log = logging.get_logger(__name__)

T = TypeVar("T")


class CheckpointManager:
    """Saves states by number, and loads the newest undamaged state.

    Each process writes and reads its own shards of the arrays, with checksums; mesh and storage of
    layers may differ when a state is loaded. A state gets its number only when it is complete.

    Args:
        directory: directory of the states; created with the first state.
        save_total_limit: number of newest states to keep; None keeps all.
    """

    def __init__(self, directory: str | Path, *, save_total_limit: int | None = None):
        self.directory = Path(directory).absolute()
        self._keep = save_total_limit

    def steps(self) -> list[int]:
        """Return the numbers of the saved states, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def save(self, state: object, step: int | None = None) -> Path:
        """Write a state, and return its directory when the state is complete.

        Args:
            state: an `EasyDeLState`, a module, or any tree of arrays.
            step: number of the state; default: its `step`, otherwise the newest number plus one.

        Raises:
            CheckpointError: the number exists, or the disk is full.
        """
        if step is None:
            state_step = getattr(state, "step", None)
            step = int(state_step) if state_step is not None else max(self.steps(), default=-1) + 1
        target = self.directory / str(step)
        if target.exists():
            raise CheckpointError(f"{target} exists: save under another step, or remove it")
        part = self.directory / f".{step}.part"
        if jax.process_index() == 0:
            shutil.rmtree(part, ignore_errors=True)
        model = state.model if isinstance(state, EasyDeLState) else state
        facts = {"step": step, "model": model_facts(model)}
        save_arrays(part, flat_arrays(_tree(state)), facts)
        if jax.process_index() == 0:
            part.rename(target)
            if self._keep is not None:
                for old in self.steps()[: -self._keep]:
                    shutil.rmtree(self.directory / str(old))
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"saved {step}")
        return target

    @overload
    def load(self, like: None = None, step: int | None = None) -> dict[str, Any]: ...

    @overload
    def load(self, like: T, step: int | None = None) -> T: ...

    def load(self, like: object = None, step: int | None = None) -> Any:
        """Read a state.

        Args:
            like: template with the structure, shapes, dtypes and shardings of the result. None
                returns nested dicts of arrays on the default device.
            step: number of the state; default: the newest undamaged state.

        Raises:
            CheckpointError: the state is missing, damaged, or does not match `like`.
        """
        steps = self.steps() if step is None else [step]
        if not steps:
            raise CheckpointError(f"there is no saved state in {self.directory}")
        for number in reversed(steps):
            directory = self.directory / str(number)
            try:
                saved_facts(directory)
                abstract_arrays = None if like is None else flat_abstract(_tree(like))
                arrays = load_arrays(directory, abstract_arrays)
            except CheckpointError as error:
                if "damaged" not in str(error) or number == steps[0]:
                    raise
                log.warning("%s; the one before it is used", error)
                continue
            return _nest_arrays(arrays) if like is None else _like(like, arrays)
        raise AssertionError("a state was returned or an error raised")


def _tree(state: object) -> object:
    return nnx.state(state) if isinstance(state, nnx.Module) else state


def _like(like: object, arrays: dict[str, jax.Array]) -> Any:
    if isinstance(like, nnx.Module):
        graphdef, state = nnx.split(like)
        return nnx.merge(graphdef, from_flat(state, arrays))
    return from_flat(like, arrays)


def _nest_arrays(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in arrays.items():
        *parents, last = name.split("/")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = leaf
    return tree
