"""`build_loader`: a mixture and a tokenizer to batches that are a pure function of the step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_data.batch import Batch, make_batch
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_data.mixture import DocumentOrder
from ed_data.plan import WINDOW, RowOptions, RowPlan
from ed_data.prefetch import Prefetcher
from ed_data.prepare import Part, default_cache_dir, prepare
from ed_data.tokenize import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Changes when the same options and data give other batches: old runs are then refused, not bent.
ORDER_VERSION = 1
_LONGEST_MULTIPLE = 8  # columns of a batch padded to its longest row
_DEFAULT_SEED = 42


class Loader:
    """Batches of one split: `batch_at(step)` for any step, or iteration that can be resumed.

    Training data never ends: epoch follows epoch, each in its own order, and a batch may hold
    rows of two. Evaluation data is read once, in order; the rows that its last batch lacks are
    empty (labels -100). Every process sees the batch of all; none holds a share of its own.

    Made by `build_loader`.

    Attributes:
        batch_size: rows of a batch.
        seq_length: columns of a batch.
        split: `"train"` or `"eval"`.
        fingerprint: hash of everything that the batches depend on.
    """

    def __init__(
        self,
        parts: list[Part],
        plan: RowPlan,
        mixture: Mixture,
        *,
        batch_size: int,
        seq_length: int,
        split: str,
        pad_id: int,
        details: dict[str, Any],
    ) -> None:
        self.batch_size, self.seq_length, self.split = batch_size, seq_length, split
        self.fingerprint = _hash(details)
        self._details = details
        self._parts, self._plan, self._pad_id = parts, plan, pad_id
        self._stores = [part.tokens for part in parts]
        options = mixture.tokenization
        self._attention_mask = options.return_attention_mask
        self._multiple = _LONGEST_MULTIPLE if options.padding == "longest" else None
        self._prefetch = Prefetcher(
            self._make, mixture.prefetch_workers, mixture.prefetch_buffer_size
        )
        self._step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first epoch: full ones for training, all for evaluation; at least 1."""
        rows = self._plan.rows_in_epoch(0)
        if self.split == "eval":
            return -(-rows // self.batch_size)
        return max(rows // self.batch_size, 1)

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step: int32 arrays [b, s], as `make_batch` describes.

        Raises:
            IndexError: the step is negative, or beyond the end of evaluation data.
        """
        last = self.steps_per_epoch if self.split == "eval" else None
        if step < 0 or (last is not None and step >= last):
            raise IndexError(f"step {step}: the steps are 0 to {'…' if last is None else last - 1}")
        return self._prefetch.get(int(step), last)

    def __iter__(self) -> Iterator[Batch]:
        """Training goes on where it is; evaluation begins anew."""
        if self.split == "eval":
            self._step = 0
        return self

    def __next__(self) -> Batch:
        if self.split == "eval" and self._step >= self.steps_per_epoch:
            raise StopIteration
        batch = self.batch_at(self._step)
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration is, as JSON values: the step, and what the data was."""
        return {"step": self._step, "fingerprint": self.fingerprint, "details": self._details}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the step of a saved state.

        Raises:
            DataError: the state is of other data or options; the message says which.
        """
        if state.get("fingerprint") != self.fingerprint:
            raise DataError(_difference(state.get("details") or {}, self._details))
        self._step = int(state["step"])

    @property
    def stats(self) -> dict[str, Any]:
        """Figures of the first epoch.

        `documents`, `rows`, `tokens` (placed), `tokens_cut` (by a length limit), `fill` (share of
        the positions that hold a token), and per source its `documents` in all and in the epoch.
        """
        rows = self._plan.rows_in_epoch(0)
        placed, dropped = self._plan.epoch_tokens(0)
        drawn = self._details["order"]["documents_per_epoch"]
        return {
            "documents": sum(drawn),
            "rows": rows,
            "tokens": placed,
            "tokens_cut": dropped,
            "fill": placed / max(rows * self.seq_length, 1),
            "steps_per_epoch": self.steps_per_epoch,
            "sources": {
                part.label: {"documents": len(part.members), "per_epoch": count}
                for part, count in zip(self._parts, drawn, strict=True)
            },
        }

    def close(self) -> None:
        """Stop prefetching."""
        self._prefetch.close()

    def _make(self, step: int) -> Batch:
        first = step * self.batch_size
        stop = first + self.batch_size
        if self.split == "eval":
            stop = min(stop, self._plan.rows_in_epoch(0))
        rows = []
        for row in range(first, stop):
            number, place = self._plan.locate(row)
            rows.append((self._plan.window(number), place))
        return make_batch(
            rows,
            self._stores,
            batch_size=self.batch_size,
            seq_length=self.seq_length,
            pad_id=self._pad_id,
            width_multiple=self._multiple,
            attention_mask=self._attention_mask,
        )


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
) -> Loader:
    """Tokenize a mixture (or find it in the cache) and plan its batches.

    Args:
        mixture: what to load and how.
        tokenizer: the model's; `mixture.tokenization.tokenizer`, where given, is taken instead.
        batch_size: rows of a batch over all hosts; default `mixture.batch_size`, else 1.
        seq_length: tokens of a row; default `mixture.pack_seq_length` when packing, else
            `mixture.tokenization.max_length`.
        seed: default where `mixture.seed` is not given; 42 without either.
        split: `"train"` or `"eval"`.
        cache_dir: default where `mixture.cache_dir` is not given.
        shuffle: False reads training data in its own order too.

    Raises:
        DataError: data is missing or empty, or options contradict each other.
    """
    length = _seq_length(mixture, seq_length)
    rows = batch_size or mixture.batch_size or 1
    seed = mixture.seed if mixture.seed is not None else _DEFAULT_SEED if seed is None else seed
    folder = mixture.cache_dir or cache_dir or default_cache_dir()
    tokenizer = load_tokenizer(mixture, tokenizer)
    encoder = Encoder.create(tokenizer, mixture.tokenization, mixture.pack_eos_token_id)
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
        seq_length=length,
        strategy=mixture.pack_strategy if mixture.pack_tokens else None,
        max_length=_document_limit(mixture, length),
        shuffle_rows=shuffle_rows,
        seed=seed,
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
        index = Path(folder) / "plans" / _hash({"data": data_details, "order": order_details})
    plan = RowPlan(
        order, [part.members for part in parts], [part.tokens for part in parts], options, index
    )
    pad = tokenizer.pad_token_id
    loader = Loader(
        parts,
        plan,
        mixture,
        batch_size=rows,
        seq_length=length,
        split=split,
        pad_id=pad if isinstance(pad, int) else encoder.eos,
        details=details,
    )
    if mixture.save is not None and split == "train":
        from ed_data.save import save_mixture

        save_mixture(mixture, tokenizer, loader=loader, cache_dir=folder)
    return loader


def load_tokenizer(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the mixture names, else the given one.

    Raises:
        DataError: there is neither, or the named one cannot be loaded.
    """
    name = mixture.tokenization.tokenizer
    if name is None:
        if tokenizer is None:
            raise DataError("no tokenizer: pass one, or set mixture.tokenization.tokenizer")
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenization.tokenizer: cannot load {name!r}: {error}") from error


def _seq_length(mixture: Mixture, given: int | None) -> int:
    own = mixture.pack_seq_length if mixture.pack_tokens else None
    if own is not None and given is not None and own != given:
        raise DataError(
            f"the sequence length is {given} here and mixture.pack_seq_length is {own}: give one"
        )
    length = own or given or mixture.tokenization.max_length
    if length is None:
        key = "mixture.pack_seq_length" if mixture.pack_tokens else "tokenization.max_length"
        raise DataError(f"no sequence length: set {key}, or pass seq_length")
    limit = mixture.tokenization.max_length
    if limit is not None and limit > length:
        raise DataError(
            f"tokenization.max_length {limit} is above the sequence length {length}: no row could "
            "hold such a document"
        )
    return int(length)


def _document_limit(mixture: Mixture, seq_length: int) -> int | None:
    """Where documents are cut; None splits them over rows instead."""
    options = mixture.tokenization
    if options.max_length is not None:
        return options.max_length
    cut = options.truncation
    if cut is None:
        cut = not mixture.pack_tokens
    return seq_length if cut else None


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Say what changed since a state was saved."""
    before, after = dict(_flat(old)), dict(_flat(new))
    changes = [
        f"{key}: {before.get(key, 'absent')} → {after.get(key, 'absent')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    what = "; ".join(changes[:6]) or "the saved state does not say what its data was"
    return (
        f"this run began with other data or options, and cannot go on with these ({what}); restore "
        "them, or start a new run"
    )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    else:
        # A state that went through JSON has lists where a fresh one may have tuples.
        yield path, json.dumps(value, default=str)
