"""Where batches come from, by step: a loader that is a function of the step, or an iterator.

A batch is a dict of numpy arrays, as `docs/data.md` describes: `input_ids`, `labels`,
`segment_ids`, `position_ids` int32 [b, s], optionally `loss_weights` float32 [b, s].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

from ed_trainers.placement import Placement

HostBatch = Mapping[str, np.ndarray]


@runtime_checkable
class Loader(Protocol):
    """Batches as a pure function of the step; may say its `steps_per_epoch` and `fingerprint`."""

    def batch_at(self, step: int) -> HostBatch:
        """Return the batch of update `step`, from 0."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Data that know their position."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position, in JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        ...


Dataset = Loader | Iterable[HostBatch]


@runtime_checkable
class Divisible(Protocol):
    """Data of which a process can read some rows alone, as it can of ed-data's loaders."""

    batch_size: int

    def for_rows(self, rows: Sequence[int]) -> Dataset:
        """Return the same batches, with these rows of each alone."""
        ...


class Share(NamedTuple):
    """What a process reads of a dataset: all of it, or its own rows of each batch.

    Attributes:
        dataset: gives what is read.
        parts: so many of these make a whole batch.
    """

    dataset: Dataset
    parts: int = 1

    @classmethod
    def of(cls, dataset: Dataset, placement: Placement, rows: int | None = None) -> Share:
        """Return the rows that this process's devices hold, where the dataset can be divided.

        Args:
            dataset: training or held-out batches.
            placement: says which rows these are.
            rows: of a microbatch; a batch is several of them, one after the other. None: the batch
                is one.
        """
        if not isinstance(dataset, Divisible):
            return cls(dataset)
        height = dataset.batch_size
        rows = rows or height
        own = placement.own_rows(rows)
        if len(own) == rows or rows % len(own) or height % rows:
            return cls(dataset)
        numbers = [begin + row for begin in range(0, height, rows) for row in own]
        return cls(dataset.for_rows(numbers), rows // len(own))


class Feed:
    """The training batches in order, beginning after any step.

    Args:
        dataset: either has `batch_at(step)`, a pure function of the step, or is an iterable of
            batches with `state_dict()` and `load_state_dict(state)`.
        share: what this process reads of it; None is all.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, dataset: Dataset, share: Share | None = None):
        self.dataset = dataset
        self._read, self.parts = share or Share(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        #: Figures of the newest batch, for the log.
        self.figures: Mapping[str, float] = {}
        self._iterator: Iterator[HostBatch] | None = None
        if not isinstance(dataset, Loader | Iterable):
            raise ConfigError(
                f"train_dataset {type(dataset).__name__} gives no batches: it needs "
                "batch_at(step), or to be an iterable with state_dict() and load_state_dict(state)"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches of one pass over the data, where the dataset knows."""
        steps = getattr(self.dataset, "steps_per_epoch", None)
        if steps is None and isinstance(self.dataset, Sized):
            steps = len(self.dataset)
        return None if steps is None else int(steps)

    def batch(self, step: int) -> HostBatch:
        """Return what is read of the batch of update `step` (from 0); iterators go in order.

        Raises:
            ConfigError: an iterator came to its end twice in a row.
        """
        if isinstance(self._read, Loader):
            return self._read.batch_at(step)
        if self._iterator is None:
            self._iterator = iter(self._read)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._read)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ConfigError("train_dataset is empty") from None

    def state_dict(self) -> dict[str, Any]:
        """Return what the dataset says about itself and its position, for a checkpoint."""
        return dict(self._read.state_dict()) if isinstance(self._read, Resumable) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; for a function of the step there is nothing to do.

        Raises:
            CheckpointError: the dataset is an iterator that cannot be moved.
        """
        if isinstance(self._read, Loader):
            return
        if not isinstance(self._read, Resumable):
            raise CheckpointError(
                f"{type(self._read).__name__} has no load_state_dict(state): training on it "
                "cannot go on where it stopped; give a loader, or set resume_if_possible=False"
            )
        self._iterator = None
        self._read.load_state_dict(dict(state))

    def difference(self, state: Mapping[str, Any]) -> str:
        """Return the dataset's own words for how it differs from the one of a checkpoint."""
        if isinstance(self._read, Resumable):
            try:
                self._read.load_state_dict(dict(state))
            except Exception as error:  # the dataset's own kind: it refuses, and says why
                return str(error)
        return "the data, or their order, are not the same"


def evaluation_batches(dataset: Dataset) -> tuple[Iterator[HostBatch], int | None]:
    """Return one pass over held-out data, and its number of batches if that is known.

    Raises:
        ConfigError: the dataset gives no batches, or is endless without saying its length.
    """
    if isinstance(dataset, Loader):
        count = getattr(dataset, "steps_per_epoch", None)
        if count is None:
            raise ConfigError(
                f"eval_dataset {type(dataset).__name__} has batch_at but no steps_per_epoch: "
                "an evaluation would never end"
            )
        return (dataset.batch_at(index) for index in range(int(count))), int(count)
    if isinstance(dataset, Iterable):
        return iter(dataset), len(dataset) if isinstance(dataset, Sized) else None
    raise ConfigError(
        f"eval_dataset {type(dataset).__name__} gives no batches: it needs batch_at(step) with "
        "steps_per_epoch, or to be iterable"
    )
