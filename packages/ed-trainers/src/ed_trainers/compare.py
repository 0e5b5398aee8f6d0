"""Compare two checkpoints: which arrays differ, and by how much.

    python -m ed_trainers.compare runs/a/checkpoints/100 runs/b/checkpoints/100

Checkpoints of a run, states that were saved (`save_state`, `CheckpointManager`), directories of
safetensors files and streams of EasyLM's are read, array by array. Arrays are compared by canonical
name, so the storage of layers does not matter. Exits with 0 where they are equal, 1 where they
differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ed_infra.errors import CheckpointError, EasyDeLError
from ed_infra.paths import canonical, is_stacked

#: Reads an array by its stored name.
Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """How one array differs.

    Attributes:
        name: canonical name.
        what: in words, where the two cannot be subtracted; else empty.
        largest: of the absolute differences.
        relative: norm of the difference by the norm of the first.
        elements: how many differ, and of how many.
    """

    name: str
    what: str = ""
    largest: float = 0.0
    relative: float = 0.0
    elements: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if self.what:
            return f"{self.name}: {self.what}"
        differ, of = self.elements
        return (
            f"{self.name}: largest {self.largest:.3g}, relative {self.relative:.3g}, "
            f"{differ:,} of {of:,} elements"
        )


class Arrays:
    """The arrays of a checkpoint by canonical name, each read when it is asked for.

    Args:
        directory: of a checkpoint, a saved state, or safetensors files; or a stream.

    Raises:
        CheckpointError: there are no arrays.
    """

    def __init__(self, directory: str | Path):
        path = Path(directory).absolute()
        if (path / "arrays").is_dir():
            path = path / "arrays"
        self.shapes: list[str]
        self._read: Read
        if path.is_file():
            self.shapes, self._read = _of_easylm(path)
        elif (path / "_METADATA").is_file():
            self.shapes, self._read = _of_orbax(path)
        elif any(path.glob("*.safetensors")):
            self.shapes, self._read = _of_safetensors(path)
        else:
            raise CheckpointError(
                f"{path} holds no arrays: give a checkpoint (<save_directory>/checkpoints/<step>), "
                "a saved state, a directory of safetensors files, or a stream of EasyLM's"
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
        CheckpointError: a directory holds no arrays.
    """
    one, two = Arrays(first), Arrays(second)
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


def _of_orbax(path: Path) -> tuple[list[str], Read]:
    import orbax.checkpoint as ocp

    from ed_trainers.stored.arrays import stored_arrays
    from ed_trainers.stored.library_log import hushed

    def read(name: str) -> np.ndarray:
        args: Any = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        with hushed(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return np.asarray(checkpointer.restore(path, args=args)[name])

    return list(stored_arrays(path)), read


def _of_easylm(path: Path) -> tuple[list[str], Read]:
    from ed_trainers.easylm import Stream

    stream = Stream(path)
    return list(stream), stream.read


def _of_safetensors(path: Path) -> tuple[list[str], Read]:
    from ed_models.checkpoints.tensor_files import TensorFiles

    files = TensorFiles.open(path)
    return list(files), files.read


def main() -> int:
    """Print how two checkpoints differ."""
    parser = argparse.ArgumentParser(prog="python -m ed_trainers.compare", description=__doc__)
    parser.add_argument("first", help="directory of a checkpoint, or a stream")
    parser.add_argument("second", help="directory of another")
    options = parser.parse_args()
    worst, count = 0.0, 0
    try:
        total = len(Arrays(options.first).entries)
        for difference in differences(options.first, options.second):
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
