"""Where batches come from, by step: a loader that is a function of the step, or an iterator.

A batch is a dict of numpy arrays, as `docs/data.md` describes: `input_ids`, `labels`,
`segment_ids`, `position_ids` int32 [b, s], optionally `loss_weights` float32 [b, s].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

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


class Feed:
    """The training batches in order, beginning after any step.

    Args:
        dataset: either has `batch_at(step)`, a pure function of the step, or is an iterable of
            batches with `state_dict()` and `load_state_dict(state)`.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
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
        """Return the batch of update `step` (from 0); iterators are asked in order.

        Raises:
            ConfigError: an iterator came to its end twice in a row.
        """
        if isinstance(self.dataset, Loader):
            return self.dataset.batch_at(step)
        if self._iterator is None:
            self._iterator = iter(self.dataset)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.dataset)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ConfigError("train_dataset is empty") from None

    def state_dict(self) -> dict[str, Any]:
        """Return what the dataset says about itself and its position, for a checkpoint."""
        return dict(self.dataset.state_dict()) if isinstance(self.dataset, Resumable) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; for a function of the step there is nothing to do.

        Raises:
            CheckpointError: the dataset is an iterator that cannot be moved.
        """
        if isinstance(self.dataset, Loader):
            return
        if not isinstance(self.dataset, Resumable):
            raise CheckpointError(
                f"{type(self.dataset).__name__} has no load_state_dict(state): training on it "
                "cannot go on where it stopped; give a loader, or set resume_if_possible=False"
            )
        self._iterator = None
        self.dataset.load_state_dict(dict(state))

    def difference(self, state: Mapping[str, Any]) -> str:
        """Return the dataset's own words for how it differs from the one of a checkpoint."""
        if isinstance(self.dataset, Resumable):
            try:
                self.dataset.load_state_dict(dict(state))
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


def count_tokens(prepared: HostBatch) -> int:
    """Number of tokens of a prepared batch that are not padding."""
    if "segment_ids" in prepared:
        return int(np.count_nonzero(prepared["segment_ids"]))
    return int(prepared["input_ids"].size) if "input_ids" in prepared else 0
