"""Compare two checkpoints: which arrays differ, and by how much.

    python -m ed_trainers.compare runs/a/checkpoints/100 runs/b/checkpoints/100
    python -m ed_trainers.compare runs/a/model runs/a/checkpoints/100

Checkpoints of a run, states that were saved (`save_state`, `CheckpointManager`), directories of
safetensors files and streams of EasyLM's are read, array by array. Arrays are compared by canonical
name, so the storage of layers does not matter. Where one side is a directory of safetensors files
and the other a checkpoint, the model of the checkpoint is first converted to Hugging Face's names
and layout. The command exits with 0 where the two are equal, and with 1 where they differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ed_infra.errors import CheckpointError, EasyDeLError
from ed_infra.parameter_names import canonical, is_stacked

#: Reads an array by its stored name.
Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """How one array differs.

    Attributes:
        name: canonical name.
        description: in words, where the two cannot be subtracted; else empty.
        largest: of the absolute differences.
        relative: norm of the difference by the norm of the first.
        elements: how many differ, and of how many.
    """

    name: str
    description: str = ""
    largest: float = 0.0
    relative: float = 0.0
    elements: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.description:
            return f"{self.name}: {self.description}"
        differ, of = self.elements
        return (
            f"{self.name}: largest {self.largest:.3g}, relative {self.relative:.3g}, "
            f"{differ:,} of {of:,} elements"
        )


class Arrays:
    """The arrays of a checkpoint by canonical name, each read at its first use.

    Args:
        directory: of a checkpoint, a saved state, or safetensors files; or a stream.

    Raises:
        CheckpointError: there are no arrays.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory).absolute()
        if _is_checkpoint(path):
            path = path / "arrays"
        self.shapes: list[str]
        self._read: Read
        if path.is_file():
            self.shapes, self._read = _open_easylm(path)
        elif (path / "_METADATA").is_file():
            self.shapes, self._read = _open_orbax(path)
        elif _has_safetensors(path):
            self.shapes, self._read = _open_safetensors(path)
        else:
            raise CheckpointError(
                f"{path} contains no arrays: pass a checkpoint "
                "(<save_directory>/checkpoints/<step>), a saved state, a directory of safetensors "
                "files, or a stream of EasyLM's"
            )
        #: Canonical name -> the stored array, and the layer of it.
        self.entries: dict[str, tuple[str, int | None]] = {}
        for name in self.shapes:
            parts = name.split("/")
            layers = range(len(canonical(parts))) if is_stacked(parts) else [None]
            for one, layer in zip(canonical(parts), layers, strict=True):
                self.entries[one] = name, layer
        self._last: tuple[str, np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        stored, layer = self.entries[name]
        if self._last is None or self._last[0] != stored:
            self._last = stored, self._read(stored)
        array = self._last[1]
        return array if layer is None else array[layer]


def differences(first: str | Path, second: str | Path) -> Iterator[Difference]:
    """Compare the arrays of two directories; two of them are in memory at a time.

    Raises:
        CheckpointError: a directory holds no arrays, or a checkpoint that is compared with a
            directory of safetensors files holds no whole model.
    """
    with _in_one_layout(first, second) as (one, two):
        yield from _between(one, two, first, second)


@contextmanager
def _in_one_layout(first: str | Path, second: str | Path) -> Iterator[tuple[Arrays, Arrays]]:
    """Open both sides; convert a checkpoint that is compared with safetensors files."""
    paths = Path(first).absolute(), Path(second).absolute()
    mixed = any(map(_is_checkpoint, paths)) and any(map(_has_safetensors, paths))
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        if mixed:
            from ed_trainers.convert import get_model

            converted = Path(directory)
            get_model(next(filter(_is_checkpoint, paths))).save_pretrained(converted)
            paths = tuple(converted if _is_checkpoint(path) else path for path in paths)
        yield Arrays(paths[0]), Arrays(paths[1])


def _is_checkpoint(path: Path) -> bool:
    return (path / "arrays").is_dir()


def _has_safetensors(path: Path) -> bool:
    return any(path.glob("*.safetensors"))


def _between(
    one: Arrays, two: Arrays, first: str | Path, second: str | Path
) -> Iterator[Difference]:
    for name in one.entries:
        if name not in two.entries:
            yield Difference(name, f"only in {first}")
            continue
        a, b = one[name], two[name]
        if a.shape != b.shape:
            yield Difference(name, f"shape {list(a.shape)} and {list(b.shape)}")
            continue
        dtypes = f"{a.dtype} and {b.dtype}" if a.dtype != b.dtype else ""
        a, b = _numbers(a), _numbers(b)
        unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
        if not unequal.any():
            if dtypes:
                yield Difference(name, f"equal, stored as {dtypes}")
            continue
        change = np.abs(a - b)
        scale = float(np.linalg.norm(a)) or 1.0
        yield Difference(
            name,
            largest=float(change.max()),
            relative=float(np.linalg.norm(change)) / scale,
            elements=(int(unequal.sum()), a.size),
        )
    for name in two.entries:
        if name not in one.entries:
            yield Difference(name, f"only in {second}")


def _numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _open_orbax(path: Path) -> tuple[list[str], Read]:
    import orbax.checkpoint as ocp

    from ed_trainers.stored.arrays import stored_arrays
    from ed_trainers.stored.library_log import hush_logger

    def read(name: str) -> np.ndarray:
        args: Any = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        with hush_logger(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return np.asarray(checkpointer.restore(path, args=args)[name])

    return list(stored_arrays(path)), read


def _open_easylm(path: Path) -> tuple[list[str], Read]:
    from ed_trainers.easylm import open_arrays

    stream = open_arrays(path)
    return list(stream), stream.read


def _open_safetensors(path: Path) -> tuple[list[str], Read]:
    from ed_models.checkpoints.pickled_files import open_tensors

    files = open_tensors(path)
    return list(files), files.read


def main() -> int:
    """Print how two checkpoints differ."""
    parser = argparse.ArgumentParser(prog="python -m ed_trainers.compare", description=__doc__)
    parser.add_argument("first", help="directory of a checkpoint, or a stream")
    parser.add_argument("second", help="directory of another")
    options = parser.parse_args()
    worst, count = 0.0, 0
    try:
        with _in_one_layout(options.first, options.second) as (one, two):
            total = len({*one.entries, *two.entries})
            for difference in _between(one, two, options.first, options.second):
                print(difference, flush=True)
                worst, count = max(worst, difference.largest), count + 1
    except EasyDeLError as error:
        print(error, file=sys.stderr)
        return 2
    if not count:
        print(f"equal: {total} arrays")
        return 0
    print(f"{count} arrays differ, of {total}; by {worst:.3g} at most")
    return 1


if __name__ == "__main__":
    sys.exit(main())
