"""`build_loader`: a mixture and a tokenizer to batches that are a pure function of the step."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ed_data.batch import Batch, Layout, make_batch
from ed_data.checks import check_names
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_data.mixture import DocumentOrder
from ed_data.plan import WINDOW, IndexedOrder, RowOptions, RowPlan, StreamedOrder
from ed_data.prepare import default_cache_dir, prepare
from ed_data.save import save_mixture
from ed_data.schema import TEXT, Schema
from ed_data.tokenize import Encoder, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
#: Changes when the same options and data give other batches: old runs are then refused, not bent.
ORDER_VERSION = 1
_LONGEST_MULTIPLE = 8  # columns of a batch padded to its longest row
_DEFAULT_SEED = 42


class Loader:
    """Batches of an indexed order: `batch_at(step)`, or iteration that can be resumed.

    Training data never ends: epoch follows epoch, each in its own order, and a batch may hold
    rows of two. Evaluation data is read once, in order; the rows that its last batch lacks are
    empty (labels -100). Every process sees the batch of all; none holds a share of its own.

    Made by `build_loader`.

    Args:
        order: the rows of each step.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
        workers: threads that make batches ahead; see `Prefetcher`.
        depth: batches made ahead.

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
    ) -> None:
        self.batch_size, self.seq_length = layout.batch_size, layout.seq_length
        self.split = "train" if order.endless else "eval"
        self.fingerprint = hash_of(details)
        self._order, self._details = order, details
        self._prefetch = Prefetcher(
            lambda step: make_batch(order.rows_at(step), layout), workers, depth
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
        _check_state(state, self.fingerprint, self._details)
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetch.close()


class StreamLoader:
    """Batches of a streamed order, one after the other; `state_dict` is where the stream is.

    Args:
        order: the rows of the batches.
        layout: the arrays of a batch.
        details: everything that the batches depend on, as JSON values.
    """

    def __init__(self, order: StreamedOrder, layout: Layout, details: dict[str, Any]) -> None:
        self.batch_size, self.seq_length = layout.batch_size, layout.seq_length
        self.fingerprint = hash_of(details)
        self._order, self._layout, self._details = order, layout, details

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return make_batch(next(self._order), self._layout)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is, as JSON values, and the details of the data."""
        state = self._order.state_dict()
        return {"order": state, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was saved.

        Raises:
            DataError: the state is of other data or options; the message says which.
        """
        _check_state(state, self.fingerprint, self._details)
        self._order.load_state_dict(state["order"])


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


def build_loader(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str = "train",
    cache_dir: str | None = None,
    shuffle: bool = True,
    schema: Schema = TEXT,
) -> Loader:
    """Tokenize a mixture (or find it in the cache) and plan its batches.

    Args:
        mixture: the sources, and how they are mixed, tokenized and packed.
        tokenizer: the model's, where `mixture.tokenization.tokenizer` names none.
        batch_size: rows of a batch over all hosts; default `mixture.batch_size`, else 1.
        seq_length: tokens of a row; default `mixture.pack_seq_length` when packing, else
            `mixture.tokenization.max_length`.
        seed: default where `mixture.seed` is not set; 42 without either.
        split: `"train"` or `"eval"`.
        cache_dir: default where `mixture.cache_dir` is not set.
        shuffle: False reads training data in its own order too.
        schema: the columns of a document: one text, or for example `ed_data.schema.PREFERENCE`.

    Raises:
        DataError: a name leads nowhere, data is missing or empty, or options contradict each other.
    """
    length = _seq_length(mixture, seq_length)
    limit = _document_limit(mixture, length, schema)
    for path, message in check_names(mixture, schema):  # before anything long starts
        raise DataError(message, path)
    rows = batch_size or mixture.batch_size or 1
    seed = mixture.seed if mixture.seed is not None else _DEFAULT_SEED if seed is None else seed
    folder = mixture.cache_dir or cache_dir or default_cache_dir()
    tokenizer = load_tokenizer(mixture, tokenizer)
    encoder = Encoder.create(tokenizer, mixture.tokenization, mixture.pack_eos_token_id, schema)
    parts = prepare(mixture, encoder, split, folder)
    shuffle = shuffle and split == "train"
    weights = mixture.mixture_weights if split == "train" else None
    order = DocumentOrder(
        [len(part.members) for part in parts],
        weights=None if weights is None else [weights[part.label] for part in parts],
        stop_strategy=mixture.stop_strategy,
        block_size=mixture.mixture_block_size if mixture.block_mixture else None,
        seed=seed,
        shuffle=shuffle,
        buffer=mixture.shuffle_buffer_size,
    )
    shuffle_rows = None
    if shuffle and mixture.pack_tokens and mixture.pack_shuffle:
        shuffle_rows = rows * mixture.pack_shuffle_buffer_factor
    options = RowOptions(
        batch_size=rows,
        seq_length=length,
        strategy=mixture.pack_strategy if mixture.pack_tokens else None,
        max_length=limit,
        shuffle_rows=shuffle_rows,
        seed=seed,
        endless=split == "train",
    )
    order_details = {
        "version": ORDER_VERSION,
        "window": WINDOW,
        "seed": seed,
        "shuffle": shuffle,
        "shuffle_buffer_size": mixture.shuffle_buffer_size,
        "mixture_weights": weights,
        "stop_strategy": mixture.stop_strategy if weights is not None else None,
        "mixture_block_size": mixture.mixture_block_size if mixture.block_mixture else None,
        "documents_per_epoch": order.documents_per_epoch(),
        "pack_strategy": options.strategy,
        "max_length": options.max_length,
        "pack_shuffle": shuffle_rows,
        "seq_length": length,
    }
    data_details = {
        "split": split,
        "eval_fraction": mixture.eval_fraction,
        "sources": {f"{i}:{part.label}": part.tokens.digest for i, part in enumerate(parts)},
    }
    details = {
        "data": data_details,
        "tokenizer": encoder.fingerprint,
        "order": order_details,
        "batch_size": rows,
    }
    index = None
    if not mixture.pack_on_the_fly:
        index = Path(folder) / "plans" / hash_of({"data": data_details, "order": order_details})
    pad = tokenizer.pad_token_id
    layout = Layout(
        batch_size=rows,
        seq_length=length,
        pad_id=pad if isinstance(pad, int) else encoder.eos,
        columns=tuple(column.name for column in schema.columns),
        width_multiple=_LONGEST_MULTIPLE if mixture.tokenization.padding == "longest" else None,
        attention_mask=mixture.tokenization.return_attention_mask,
    )
    plan = RowPlan(order, parts, options, index)
    if encoder.has_loss_mask:
        plan.check_labels()
    loader = Loader(
        plan,
        layout,
        details,
        workers=mixture.prefetch_workers,
        depth=mixture.prefetch_buffer_size,
    )
    if mixture.save is not None and split == "train":
        save_mixture(mixture, tokenizer, loader=loader, cache_dir=folder, schema=schema)
    return loader


def _seq_length(mixture: Mixture, wanted: int | None) -> int:
    limit = mixture.tokenization.max_length
    own = mixture.pack_seq_length if mixture.pack_tokens else None
    if own is not None and wanted is not None and own != wanted:
        raise DataError(
            f"the sequence length is {wanted} here and mixture.pack_seq_length is {own}: set one",
            ("pack_seq_length",),
        )
    length = own or wanted or limit
    if length is None:
        path = ("pack_seq_length",) if mixture.pack_tokens else ("tokenization", "max_length")
        key = "mixture.pack_seq_length" if mixture.pack_tokens else "tokenization.max_length"
        raise DataError(f"no sequence length: set {key}, or pass seq_length", path)
    if limit is not None and limit > length:
        raise DataError(
            f"tokenization.max_length {limit} is above the sequence length {length}: no row could "
            "hold such a document",
            ("tokenization", "max_length"),
        )
    return int(length)


def _document_limit(mixture: Mixture, seq_length: int, schema: Schema) -> int | None:
    """Where documents are cut; None splits them over rows instead."""
    options, whole = mixture.tokenization, len(schema.columns) > 1
    if whole and options.truncation is False:
        raise DataError(
            f"documents of {len(schema.columns)} columns are never split over rows: leave out "
            "truncation: false",
            ("tokenization", "truncation"),
        )
    if whole and mixture.pack_tokens and mixture.pack_strategy == "wrapped":
        raise DataError(
            f"pack_strategy 'wrapped' cuts documents anywhere, and documents of "
            f"{len(schema.columns)} columns are never split: take 'bfd', 'first_fit' or 'greedy'",
            ("pack_strategy",),
        )
    if options.max_length is not None:
        return options.max_length
    cut = options.truncation
    if cut is None:
        cut = whole or not mixture.pack_tokens
    return seq_length if cut else None


def hash_of(details: object) -> str:
    """Return a short hash of JSON values."""
    text = json.dumps(details, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_state(state: dict[str, Any], fingerprint: str, details: dict[str, Any]) -> None:
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
