"""Sources of batches: a loader that is a function of the step, or an iterator with a position.

A batch is a mapping of numpy arrays, as `docs/data.md` describes: `input_ids`, `labels`,
`segment_ids`, `position_ids` int32 [b, s], optionally `loss_weights` float32 [b, s] and the arrays
of other modalities.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.sharding.axes import LogicalAxes
from jaxtyping import Float

from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement

HostBatch = Mapping[str, np.ndarray]


@runtime_checkable
class BatchLoader(Protocol):
    """Batches by step; optionally with `steps_per_epoch` and `fingerprint`."""

    def batch_at(self, step: int) -> HostBatch:
        """Return the batch of update `step`, from 0."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Data with a position that can be saved and restored."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a saved position."""
        ...


@runtime_checkable
class Comparable(Protocol):
    """Data whose batches may be those of a saved state up to a step only."""

    def compare_state(self, state: dict[str, Any], step: int) -> str | None:
        """Return how the batches before `step` differ from those of a saved state, or None."""
        ...


Dataset = BatchLoader | Iterable[HostBatch]


@runtime_checkable
class Divisible(Protocol):
    """Data that can yield selected rows of each batch, such as the loaders of ed-data."""

    batch_size: int

    def for_rows(self, rows: Sequence[int]) -> Dataset:
        """Return the same batches with only these rows."""
        ...


class Share(NamedTuple):
    """The part of a dataset that a process reads: the whole batches, or its own rows.

    Attributes:
        dataset: yields the batches or their rows.
        parts: number of processes that share a batch.
    """

    dataset: Dataset
    parts: int = 1

    @classmethod
    def of(cls, dataset: Dataset, placement: Placement, rows: int | None = None) -> Share:
        """Return the rows that the devices of this process hold, if the dataset can be divided.

        Args:
            dataset: training or held-out batches.
            placement: determines the rows of this process.
            rows: rows of a microbatch; a batch contains consecutive microbatches. None: a batch is
                one microbatch.
        """
        if not isinstance(dataset, Divisible):
            return cls(dataset)
        height = dataset.batch_size
        rows = rows or height
        process_rows = placement.own_rows(rows)
        if len(process_rows) == rows or rows % len(process_rows) or height % rows:
            return cls(dataset)
        numbers = [begin + row for begin in range(0, height, rows) for row in process_rows]
        return cls(dataset.for_rows(numbers), rows // len(process_rows))


class Feed:
    """The training batches in order, starting after any step.

    Args:
        dataset: a loader with `batch_at(step)`, a pure function of the step, or an iterable of
            batches with `state_dict()` and `load_state_dict(state)`.
        share: the part that this process reads; None reads whole batches.

    Raises:
        ConfigError: the dataset is neither.
    """

    def __init__(self, dataset: Dataset, share: Share | None = None):
        self.dataset = dataset
        self._read, self.parts = share or Share(dataset)
        self.fingerprint: str | None = getattr(dataset, "fingerprint", None)
        #: Figures of the newest batch, for the log.
        self.figures: Mapping[str, float] = {}
        #: Completions of which the newest batch has rows, see `MetricsLog.write_samples`.
        self.samples: Sequence[Mapping[str, object]] = ()
        self._iterator: Iterator[HostBatch] | None = None
        if not isinstance(dataset, BatchLoader | Iterable):
            raise ConfigError(
                f"train_dataset {type(dataset).__name__} has no batches: pass a loader with "
                "batch_at(step), or an iterable with state_dict() and load_state_dict(state)"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of batches in one pass over the data, if the dataset knows its length."""
        return self._count_batches()

    def _count_batches(self) -> int | None:
        steps = getattr(self.dataset, "steps_per_epoch", None)
        if steps is None and isinstance(self.dataset, Sized):
            steps = len(self.dataset)
        return None if steps is None else int(steps)

    def count_steps(self, epochs: int) -> int | None:
        """Return the number of batches of several passes, if the dataset knows its length.

        A dataset that cannot count them has the same number of batches in each pass.
        """
        count = getattr(self.dataset, "count_steps", None)
        if count is not None:
            return int(count(epochs))
        steps = self._count_batches()
        return None if steps is None else steps * epochs

    def batch(self, step: int) -> HostBatch:
        """Return the rows of this process of the batch of update `step` (from 0).

        An iterator ignores `step` and yields its next batch.

        Raises:
            ConfigError: an iterator has no batch.
        """
        if isinstance(self._read, BatchLoader):
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
        """Return the state of the dataset, position included, for a checkpoint."""
        return dict(self._read.state_dict()) if isinstance(self._read, Resumable) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; a loader with `batch_at` has no position.

        Raises:
            CheckpointError: the dataset is an iterator without `load_state_dict`.
        """
        if isinstance(self._read, BatchLoader):
            return
        if not isinstance(self._read, Resumable):
            raise CheckpointError(
                f"{type(self._read).__name__} has no load_state_dict(state), so training cannot "
                "resume: pass a loader, or set resume_if_possible=False"
            )
        self._iterator = None
        self._read.load_state_dict(dict(state))

    def difference(self, state: Mapping[str, Any], step: int) -> str | None:
        """Return how the dataset differs from the dataset of a checkpoint.

        Args:
            state: the state of the dataset in the checkpoint, whose fingerprint is another one.
            step: number of updates of the checkpoint.

        Returns:
            The differences; None if the batches before `step` are the same.
        """
        if isinstance(self._read, Comparable):
            return self._read.compare_state(dict(state), step)
        if isinstance(self._read, Resumable):
            try:
                self._read.load_state_dict(dict(state))
            except Exception as error:  # the class of the error is the dataset's own
                return str(error)
        return "the data or their order have changed"


class Epochs:
    """The steps at which the epochs of a run end.

    Args:
        feed: the training batches.
        longest: maximum number of steps of an epoch, and the number for data without a length.
    """

    def __init__(self, feed: Feed, longest: int | None = None):
        self._feed, self._longest = feed, longest
        self._ends: list[int] = []

    def count_steps(self, epochs: int) -> int | None:
        """Return the number of steps of several epochs; None if it is unknown."""
        steps = self._feed.count_steps(epochs)
        if self._longest is None:
            return steps
        limit = self._longest * epochs
        return limit if steps is None else min(limit, steps)

    def ends_at(self, step: int) -> bool:
        """Return whether an epoch ends with update `step` (from 1).

        Raises:
            ConfigError: the length of an epoch is unknown.
        """
        return self.divides_at(step, 1)

    def divides_at(self, step: int, parts: int) -> bool:
        """Return whether one of the equal parts of an epoch ends with update `step` (from 1).

        Raises:
            ConfigError: the length of an epoch is unknown.
        """
        while not self._ends or self._ends[-1] < step:
            end = self.count_steps(len(self._ends) + 1)
            if end is None:
                raise ConfigError(
                    "train_dataset has no length, so no step ends an epoch: set "
                    "per_epoch_training_steps, or use steps instead of epochs"
                )
            if self._ends and end <= self._ends[-1]:
                return False
            self._ends.append(end)
        number = bisect_left(self._ends, step)
        start, end = (self._ends[number - 1] if number else 0), self._ends[number]
        return (step - start) * parts // (end - start) > (step - 1 - start) * parts // (end - start)


def count_interval_steps(interval: float | None, total_steps: int) -> int | None:
    """Return the whole number of steps of an interval, in a run of `total_steps` steps."""
    if interval is None or interval >= 1:
        return None if interval is None else int(interval)
    return math.ceil(total_steps * interval)  # as in transformers


@dataclass(frozen=True)
class Cadence:
    """The steps of a run at which a repeated task is due.

    Attributes:
        steps: number of steps between two times; None: none.
        parts: number of times in each epoch; None: none.
        epochs: the ends of the epochs.
    """

    steps: int | None
    parts: int | None
    epochs: Epochs

    @classmethod
    def from_arguments(
        cls, task: str, arguments: TrainingArguments, total_steps: int, epochs: Epochs
    ) -> Cadence:
        """Return the cadence of a task: `save`, `evaluation` or `log`."""
        interval, strategy, number = {
            "save": (arguments.save_steps, arguments.save_strategy, arguments.saves_per_epoch),
            "evaluation": (
                arguments.evaluation_steps,
                arguments.eval_strategy,
                arguments.evals_per_epoch,
            ),
            "log": (arguments.log_steps, arguments.log_strategy, None),
        }[task]
        parts = 1 if strategy == "epoch" else number
        steps = count_interval_steps(interval, total_steps)
        return cls(None if parts or strategy == "no" else steps, parts, epochs)

    def is_due(self, step: int) -> bool:
        """Return whether the task is due after update `step` (from 1)."""
        if self.parts is not None:
            return self.epochs.divides_at(step, self.parts)
        return self.steps is not None and step % self.steps == 0


def evaluation_batches(
    dataset: Dataset, limit: int | None = None
) -> tuple[Iterator[HostBatch], int | None]:
    """Return one pass over held-out data, and its number of batches if that is known.

    Args:
        dataset: the held-out batches.
        limit: number of batches after which the pass ends; None: all.

    Raises:
        ConfigError: the dataset yields no batches, or is a loader without a length or a limit.
    """
    if isinstance(dataset, BatchLoader):
        length = getattr(dataset, "steps_per_epoch", None)
        if length is None and limit is None:
            raise ConfigError(
                f"eval_dataset {type(dataset).__name__} has batch_at but no steps_per_epoch: "
                "an evaluation would not end. Set max_evaluation_steps"
            )
        count = min(int(x) for x in (length, limit) if x is not None)
        return (dataset.batch_at(index) for index in range(count)), count
    if isinstance(dataset, Iterable):
        size = len(dataset) if isinstance(dataset, Sized) else None
        if limit is None:
            return iter(dataset), size
        return islice(dataset, limit), limit if size is None else min(limit, size)
    raise ConfigError(
        f"eval_dataset {type(dataset).__name__} has no batches: pass a loader with "
        "batch_at(step) and steps_per_epoch, or an iterable"
    )


#: Logical axes of one image for each row.
IMAGE_AXES: LogicalAxes = ("batch", None, None, None)


def get_pixel_values(batch: HostBatch, method: str) -> Float[np.ndarray, "b c h w"]:
    """Return the image of each row.

    Args:
        batch: `pixel_values` [b, 1, c, h, w], as loaders return them, or [b, c, h, w].
        method: name of the method, for messages.

    Raises:
        ConfigError: the batch has no images, or several for a row.
    """
    if "pixel_values" not in batch:
        raise ConfigError(
            f"a batch for {method} has pixel_values, not only {', '.join(sorted(batch))}"
        )
    pixels = np.asarray(batch["pixel_values"], np.float32)
    if pixels.ndim == 5 and pixels.shape[1] == 1:
        pixels = pixels[:, 0]
    if pixels.ndim != 4:
        raise ConfigError(
            f"pixel_values of {method} have the shape {pixels.shape}: give one image for each row, "
            "[b, c, h, w] or [b, 1, c, h, w]"
        )
    return pixels
