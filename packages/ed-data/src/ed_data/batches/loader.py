"""Loaders: batches of an order, as a function of the step or one after the other."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ed_data.batches.arrays import Batch, Layout, make_batch
from ed_data.errors import DataError, listing
from ed_data.order.plan import IndexedOrder, StreamedOrder

T = TypeVar("T")


class Loader:
    """Batches of an indexed order: `batch_at(step)`, or iteration that can be resumed.

    Training data never ends: epoch follows epoch, each in its own order, and a batch may hold
    rows of two. Evaluation data is read once, in order; the rows that its last batch lacks are
    empty (labels -100). Every process makes the whole batch, or its share; see `for_rows`.

    Made by `ed_data.build_loader`.

    Args:
        order: the rows of each step.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
        workers: threads that make batches ahead; see `Prefetcher`.
        depth: batches made ahead.
        on_close: ends what the order works with.
        rows: those of each batch that are made; None makes all.

    Attributes:
        batch_size: rows of a batch.
        seq_length: columns of a batch.
        split: `"train"` or `"eval"`.
        fingerprint: hash of the details.
    """

    def __init__(
        self,
        order: IndexedOrder,
        layout: Layout,
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
        self.fingerprint = hash_of(details)
        self._order, self._details = order, details
        self._prefetch = Prefetcher(
            lambda step: make_batch(order.rows_at(step), layout, rows), workers, depth
        )
        self._step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first epoch: full ones for training, all for evaluation; at least 1."""
        return self._order.steps_per_epoch

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of the first epoch, as `RowPlan.stats` describes."""
        return self._order.stats

    def for_rows(self, rows: Sequence[int]) -> Loader:
        """Return a loader of some rows of the same batches: the share of one process of several.

        The tokens of other rows are not read, and arrays have `len(rows)` rows; `batch_size`, the
        fingerprint and the state are those of the whole, so a state fits any number of processes.

        Args:
            rows: numbers of rows of a batch, without repetition: for example
                `range(index * batch_size // count, (index + 1) * batch_size // count)`.

        Raises:
            DataError: there is no such row, or one is named twice.
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

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step: int32 arrays [b, s], as `make_batch` describes.

        Raises:
            IndexError: the step is negative, or beyond the end of evaluation data.
        """
        last = None if self._order.endless else self.steps_per_epoch
        if step < 0 or (last is not None and step >= last):
            raise IndexError(f"step {step}: the steps are 0 to {'…' if last is None else last - 1}")
        return self._prefetch.get(int(step), last)

    def __iter__(self) -> Iterator[Batch]:
        """Training goes on where it is; evaluation begins anew."""
        if not self._order.endless:
            self._step = 0
        return self

    def __next__(self) -> Batch:
        if not self._order.endless and self._step >= self.steps_per_epoch:
            raise StopIteration
        batch = self.batch_at(self._step)
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration is, as JSON values: the step, and the details of the data."""
        return {"step": self._step, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the step of a saved state.

        Raises:
            DataError: the state is of other data or options; the message says which.
        """
        check_state(state, self.fingerprint, self._details)
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetch.close()
        if self._on_close is not None:
            self._on_close()


class StreamLoader:
    """Batches of a streamed order, one after the other; `state_dict` is where the stream is.

    Args:
        order: the rows of the batches.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
        split: `"train"` goes on where it is; `"eval"` begins anew with each iteration.
        rows: those of each batch that are made; None makes all.
    """

    #: Nothing is known of what has not been read.
    steps_per_epoch: int | None = None

    def __init__(
        self,
        order: StreamedOrder,
        layout: Layout,
        details: dict[str, Any],
        split: str = "train",
        rows: Sequence[int] | None = None,
    ) -> None:
        self._rows = rows
        self.batch_size, self.seq_length, self.split = layout.batch_size, layout.seq_length, split
        self.fingerprint = hash_of(details)
        self._order, self._layout, self._details = order, layout, details
        self._begin = order.state_dict() if split == "eval" else None

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of what has been read, as `StreamPlan.stats` describes."""
        return self._order.stats

    def __iter__(self) -> Iterator[Batch]:
        """Training goes on where it is; evaluation begins anew."""
        if self._begin is not None:
            self._order.load_state_dict(self._begin)
        return self

    def for_rows(self, rows: Sequence[int]) -> StreamLoader:
        """Return a loader of some rows, as `Loader.for_rows`; it goes on in place of this one.

        Which documents share a row is known only when all of a window are encoded, so each process
        reads the whole stream, and makes the arrays of its own rows.
        """
        chosen = checked_rows(rows, self.batch_size)
        return StreamLoader(self._order, self._layout, self._details, self.split, chosen)

    def __next__(self) -> Batch:
        return make_batch(next(self._order), self._layout, self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is, as JSON values, and the details of the data."""
        state = self._order.state_dict()
        return {"order": state, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was saved.

        Raises:
            DataError: the state is of other data or options; the message says which.
        """
        check_state(state, self.fingerprint, self._details)
        self._order.load_state_dict(state["order"])

    def close(self) -> None:
        """Stop preparing batches ahead."""
        self._order.close()


class Prefetcher(Generic[T]):
    """Call `make(step)` ahead, in threads, for the steps after the one that was asked for.

    Args:
        make: a pure function of the step, safe to call from several threads.
        workers: threads; 0 makes each step when it is asked for.
        depth: steps made ahead.
    """

    def __init__(self, make: Callable[[int], T], workers: int, depth: int) -> None:
        self._make = make
        self._workers, self._depth = workers, depth
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[T]] = {}
        self._lock = threading.Lock()

    def get(self, step: int, last: int | None = None) -> T:
        """Return `make(step)` and start on the steps after it, up to (not including) `last`."""
        if self._workers == 0 or self._depth == 0:
            return self._make(step)
        with self._lock:
            ready = self._ahead.pop(step, None)
            wanted = range(step + 1, step + 1 + self._depth)
            for other in [s for s in self._ahead if s not in wanted]:
                self._ahead.pop(other).cancel()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ed-data")
            for following in wanted:
                if following not in self._ahead and (last is None or following < last):
                    self._ahead[following] = self._pool.submit(self._make, following)
        return self._make(step) if ready is None else ready.result()

    def close(self) -> None:
        """Stop the threads; a step that is being made is finished and forgotten."""
        with self._lock:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def checked_rows(rows: Sequence[int], batch_size: int) -> list[int]:
    """Numbers of rows of a batch.

    Raises:
        DataError: there is no such row, or one is named twice.
    """
    chosen = [int(row) for row in rows]
    if not chosen or len({*chosen}) < len(chosen) or not {*chosen} <= {*range(batch_size)}:
        raise DataError(
            f"rows {listing(chosen)}: name some of the rows 0 to {batch_size - 1} of a batch, each "
            "once"
        )
    return chosen


def hash_of(details: object) -> str:
    """Return a short hash of JSON values."""
    text = json.dumps(details, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_state(state: dict[str, Any], fingerprint: str, details: dict[str, Any]) -> None:
    """Refuse the state of other data, and say what changed since it was saved."""
    if state.get("fingerprint") == fingerprint:
        return
    before, after = dict(_flat(state.get("details") or {})), dict(_flat(details))
    changes = [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    reason = "; ".join(changes[:6]) or "the saved state does not say what its data was"
    raise DataError(
        f"this run began with other data or options, and cannot go on with these ({reason}); "
        "restore them, or start a new run"
    )


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        # A state that went through JSON has lists where a fresh one may have tuples.
        yield path, json.dumps(value, default=str)
