"""Loaders: batches as a function of the step, or one after another."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from ed_data.batches.arrays import BatchLayout, NumpyBatch, make_batch
from ed_data.errors import DataError, listing
from ed_data.order.windows import IndexedOrder, StreamedOrder

T = TypeVar("T")
#: Key of the details of a loader: the hashes of excluded documents.
EXCLUDED = "excluded"


class Loader:
    """Batches of an indexed order: `batch_at(step)`, or iteration that can be resumed.

    Training data is endless: epochs follow one another, each in its own order, and a batch may
    contain rows of two epochs. Evaluation data is read once, in order; the last batch is filled
    with empty rows (labels -100). Each process creates the whole batch, or its share; see
    `for_rows`.

    Created by `ed_data.build_loader`.

    Args:
        order: the rows of each step.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
        workers: number of threads that prefetch batches; see `Prefetcher`.
        depth: number of prefetched batches.
        on_close: releases the resources of the order.
        rows: numbers of the rows of each batch to create; None creates all rows.

    Attributes:
        batch_size: number of rows of a batch.
        seq_length: number of positions of a row.
        split: `"train"` or `"eval"`.
        fingerprint: hash of the details.
    """

    def __init__(
        self,
        order: IndexedOrder,
        layout: BatchLayout,
        details: dict[str, Any],
        *,
        workers: int = 0,
        depth: int = 0,
        on_close: Callable[[], None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._layout, self._workers, self._depth = layout, workers, depth
        self._on_close = on_close
        self.batch_size, self.seq_length = layout.batch_size, layout.seq_length
        self.split = "train" if order.endless else "eval"
        self.fingerprint = hash_json(details)
        self._order, self._details = order, details
        self._prefetch = Prefetcher(
            lambda step: make_batch(order.rows_at(step), layout, rows), workers, depth
        )
        self._step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of the first epoch: full ones for training (at least 1), else all."""
        return self._order.steps_per_epoch

    def count_steps(self, epochs: int) -> int:
        """Return the number of batches of several passes; see `RowPlan.count_steps`."""
        return self._order.count_steps(epochs)

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the first epoch, see `RowPlan.stats`."""
        return self._order.stats

    def for_rows(self, rows: Sequence[int]) -> Loader:
        """Return a loader of some rows of the same batches, the share of one of several processes.

        The tokens of other rows are not read, and arrays have `len(rows)` rows. `batch_size`, the
        fingerprint and the state are those of the whole batch, so a state is valid for any number
        of processes.

        Args:
            rows: distinct numbers of rows of a batch, for example
                `range(index * batch_size // count, (index + 1) * batch_size // count)`.

        Raises:
            DataError: a row does not exist, or occurs twice.
        """
        loader = Loader(
            self._order,
            self._layout,
            self._details,
            workers=self._workers,
            depth=self._depth,
            on_close=self._on_close,
            rows=checked_rows(rows, self.batch_size),
        )
        loader._step = self._step
        return loader

    def batch_at(self, step: int) -> NumpyBatch:
        """Return the batch of a step; see `make_batch` for its arrays.

        Raises:
            IndexError: the step is negative, or after the end of evaluation data.
        """
        last = None if self._order.endless else self.steps_per_epoch
        if step < 0 or (last is not None and step >= last):
            end = "…" if last is None else last - 1
            raise IndexError(f"step {step} does not exist: the steps are 0 to {end}")
        return self._prefetch.get(int(step), last)

    def __iter__(self) -> Iterator[NumpyBatch]:
        """Continue training data at its position; restart evaluation data."""
        if not self._order.endless:
            self._step = 0
        return self

    def __next__(self) -> NumpyBatch:
        if not self._order.endless and self._step >= self.steps_per_epoch:
            raise StopIteration
        batch = self.batch_at(self._step)
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the details of the data, as JSON values."""
        return {"step": self._step, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the step of a saved state.

        Raises:
            DataError: the state belongs to other data or options; the message lists them.
        """
        check_state(state, self.fingerprint, self._details)
        self._step = int(state["step"])

    def find_steps(self, hashes: Sequence[str], stop: int) -> dict[str, list[int]]:
        """Return the steps before `stop` that have a place for documents; see `RowPlan.find_steps`.

        Args:
            hashes: `Example.digest` of the documents, as 16 hexadecimal digits.
            stop: number of steps to search.
        """
        digests = np.array([int(one, 16) for one in hashes], np.uint64)
        steps = self._order.find_steps(digests, stop)
        return {one: steps[int(one, 16)] for one in hashes}

    def compare_state(self, state: Mapping[str, Any], step: int) -> str | None:
        """Return how the batches before a step differ from those of a saved state.

        Excluded documents may differ if no step before `step` has a place for them.

        Returns:
            The differences, or None.
        """
        saved_details = dict(state.get("details") or {})
        excluded, now = saved_details.pop(EXCLUDED, []), self._details.get(EXCLUDED, [])
        own_details = {key: value for key, value in self._details.items() if key != EXCLUDED}
        saved = {**state, "fingerprint": hash_json(saved_details), "details": saved_details}
        try:
            check_state(saved, hash_json(own_details), own_details)
        except DataError as error:
            return str(error)
        steps = self.find_steps(sorted({*excluded} ^ {*now}), step)
        used = {one: first[0] for one, first in steps.items() if first}
        if not used:
            return None
        name, first = min(used.items(), key=lambda item: item[1])
        return (
            f"mixture.exclude has changed, and step {first + 1} has a place for the document "
            f"{name}: elarge forget continues from a checkpoint before that step"
        )

    def close(self) -> None:
        """Stop prefetching and release resources."""
        self._prefetch.close()
        if self._on_close is not None:
            self._on_close()


class StreamLoader:
    """Batches of a streamed order, one after another; `state_dict` is the position of the stream.

    Args:
        order: the rows of the batches.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
        split: `"train"` continues at its position; `"eval"` restarts with each iteration.
        rows: numbers of the rows of each batch to create; None creates all rows.
    """

    #: Unknown, because a stream is not read in advance.
    steps_per_epoch: int | None = None

    def __init__(
        self,
        order: StreamedOrder,
        layout: BatchLayout,
        details: dict[str, Any],
        split: str = "train",
        rows: Sequence[int] | None = None,
    ) -> None:
        self._rows = rows
        self.batch_size, self.seq_length, self.split = layout.batch_size, layout.seq_length, split
        self.fingerprint = hash_json(details)
        self._order, self._layout, self._details = order, layout, details
        self._begin = order.state_dict() if split == "eval" else None

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the rows read so far, see `StreamPlan.stats`."""
        return self._order.stats

    def __iter__(self) -> Iterator[NumpyBatch]:
        """Continue training data at its position; restart evaluation data."""
        if self._begin is not None:
            self._order.load_state_dict(self._begin)
        return self

    def for_rows(self, rows: Sequence[int]) -> StreamLoader:
        """Return a loader of some rows, as `Loader.for_rows`; it replaces this loader.

        The rows of a window are known only when all of its documents are encoded, so each process
        reads the whole stream and creates the arrays of its own rows.
        """
        row_numbers = checked_rows(rows, self.batch_size)
        return StreamLoader(self._order, self._layout, self._details, self.split, row_numbers)

    def __next__(self) -> NumpyBatch:
        return make_batch(next(self._order), self._layout, self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream and the details of the data, as JSON values."""
        state = self._order.state_dict()
        return {"order": state, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a saved state.

        Raises:
            DataError: the state belongs to other data or options; the message lists them.
        """
        check_state(state, self.fingerprint, self._details)
        self._order.load_state_dict(state["order"])

    def close(self) -> None:
        """Stop prefetching."""
        self._order.close()


class Prefetcher(Generic[T]):
    """Call `make(step)` in threads for the steps after the most recent request.

    Args:
        make: a thread-safe pure function of the step.
        workers: number of threads; 0 calls `make` at each request.
        depth: number of prefetched steps.
    """

    def __init__(self, make: Callable[[int], T], workers: int, depth: int) -> None:
        self._make = make
        self._workers, self._depth = workers, depth
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[T]] = {}
        self._lock = threading.Lock()

    def get(self, step: int, last: int | None = None) -> T:
        """Return `make(step)` and start the next steps, up to (not including) `last`."""
        if self._workers == 0 or self._depth == 0:
            return self._make(step)
        with self._lock:
            ready = self._ahead.pop(step, None)
            next_steps = range(step + 1, step + 1 + self._depth)
            for stale_step in [s for s in self._ahead if s not in next_steps]:
                self._ahead.pop(stale_step).cancel()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ed-data")
            for following in next_steps:
                if following not in self._ahead and (last is None or following < last):
                    self._ahead[following] = self._pool.submit(self._make, following)
        return self._make(step) if ready is None else ready.result()

    def close(self) -> None:
        """Stop the threads; the result of a running step is discarded."""
        with self._lock:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def checked_rows(rows: Sequence[int], batch_size: int) -> list[int]:
    """Return numbers of rows of a batch as integers.

    Raises:
        DataError: a row does not exist, or occurs twice.
    """
    row_numbers = [int(row) for row in rows]
    if (
        not row_numbers
        or len({*row_numbers}) < len(row_numbers)
        or not {*row_numbers} <= {*range(batch_size)}
    ):
        raise DataError(
            f"rows {listing(row_numbers)} are invalid: name some of the rows 0 to {batch_size - 1} "
            "of a "
            "batch, each once"
        )
    return row_numbers


def hash_json(details: object) -> str:
    """Return a short hash of JSON values."""
    text = json.dumps(details, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_state(state: dict[str, Any], fingerprint: str, details: dict[str, Any]) -> None:
    """Raise a `DataError` that lists the changes if a state belongs to other data or options."""
    if state.get("fingerprint") == fingerprint:
        return
    old_details, new_details = dict(_flat(state.get("details") or {})), dict(_flat(details))
    changes = [
        f"{key}: {old_details.get(key, 'absent')} → {new_details.get(key, 'absent')}"
        for key in sorted({*old_details, *new_details})
        if old_details.get(key) != new_details.get(key)
    ]
    reason = "; ".join(changes[:6]) or "the saved state does not describe its data"
    raise DataError(
        f"the run started with other data or options and cannot continue ({reason}); restore them, "
        "or start a new run"
    )


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        # JSON turns tuples into lists, so values are compared as JSON.
        yield path, json.dumps(value, default=str)
