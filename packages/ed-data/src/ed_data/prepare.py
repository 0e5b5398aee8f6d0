"""From options to tokens: open the informs, tokenize what is not cached, hold out a part."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ed_data import transforms
from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.lazy_tokens import LazyTokens
from ed_data.sources import OpenOptions, open_source
from ed_data.split import held_out
from ed_data.store import VERSION, Tokens, TokenStore, write_store
from ed_data.tokenize import Encoded, Encoder
from ed_data.transforms import Content, Document

log = logging.getLogger("ed_data")


@dataclass(frozen=True)
class Part:
    """The documents of one inform that belong to a split.

    Attributes:
        label: the inform's name.
        tokens: all documents of the inform.
        members: numbers of those of the split, ascending.
    """

    label: str
    tokens: Tokens
    members: NDArray[np.int64]


def default_cache_dir() -> str:
    """Where caches go unless told otherwise: `$ED_DATA_CACHE`, else in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("ED_DATA_CACHE") or os.path.join(home, "ed-data")


def open_options(mixture: Mixture, cache_dir: str) -> OpenOptions:
    """How sources are to be opened for a mixture."""
    keep = mixture.cache_remote_files and not mixture.pack_on_the_fly
    return OpenOptions(os.path.join(cache_dir, "files") if keep else None)


def prepare(mixture: Mixture, encoder: Encoder, split: str, cache_dir: str) -> list[Part]:
    """Return the documents of a split as tokens, from the cache where they are there.

    Raises:
        DataError: a source is missing or empty, or the split is.
    """
    check_split(mixture, split)
    parts: list[Part] = []
    if split == "train" or mixture.eval_fraction is not None:
        stores = [_tokens(inform, mixture, encoder, cache_dir) for inform in mixture.informs]
        masks = [np.zeros(len(store.hashes), bool) for store in stores]
        if mixture.eval_fraction is not None:
            masks = held_out([store.hashes for store in stores], mixture.eval_fraction)
        for inform, store, mask in zip(mixture.informs, stores, masks, strict=True):
            members = np.flatnonzero(mask if split == "eval" else ~mask)
            if len(members):
                parts.append(Part(inform.label, store, members))
            elif split == "train" and mixture.mixture_weights is not None:
                raise DataError(
                    f"inform {inform.label!r} has a weight, and all of its documents are held out "
                    f"by eval_fraction {mixture.eval_fraction}"
                )
    if split == "eval":
        for inform in mixture.eval_informs:
            store = _tokens(inform, mixture, encoder, cache_dir)
            parts.append(Part(inform.label, store, np.arange(len(store.hashes))))
    return _distinct(parts)


def _distinct(parts: list[Part]) -> list[Part]:
    """Number the parts whose informs have the same name, for the figures that name them."""
    seen: Counter[str] = Counter()
    result = []
    for part in parts:
        seen[part.label] += 1
        number = seen[part.label]
        label = part.label if number == 1 else f"{part.label} ({number})"
        result.append(replace(part, label=label))
    return result


def contents(
    mixture: Mixture, split: str = "train", cache_dir: str | None = None
) -> Iterator[Content]:
    """Yield the contents (texts, messages, ids) of a split's documents, inform after inform.

    It needs no tokenizer: use it to train one on the training documents alone, or to evaluate on
    the held-out text as it was written.

    Raises:
        DataError: as `prepare`.
    """
    check_split(mixture, split)
    options = open_options(mixture, cache_dir or mixture.cache_dir or default_cache_dir())

    def read(inform: Inform) -> Iterator[Document]:
        return _counted(transforms.documents(inform, open_source(inform, options)), inform)

    if mixture.eval_fraction is not None:
        hashes = [
            np.fromiter((document.digest for document in read(inform)), np.uint64)
            for inform in mixture.informs
        ]
        masks = held_out(hashes, mixture.eval_fraction)
        for inform, mask in zip(mixture.informs, masks, strict=True):
            for document, is_held_out in zip(read(inform), mask, strict=True):
                if is_held_out == (split == "eval"):
                    yield document.content
    elif split == "train":
        for inform in mixture.informs:
            yield from (document.content for document in read(inform))
    if split == "eval":
        for inform in mixture.eval_informs:
            yield from (document.content for document in read(inform))


def texts(mixture: Mixture, split: str = "train", cache_dir: str | None = None) -> Iterator[str]:
    """Yield the documents of a split as text; of chat rows, each message's text.

    Documents given as token ids have no text, and are left out.
    """
    for content in contents(mixture, split, cache_dir):
        if isinstance(content, str):
            yield content
        elif isinstance(content[0], dict):
            for message in content:
                if isinstance(message, dict) and isinstance(message["content"], str):
                    yield message["content"]


def check_split(mixture: Mixture, split: str) -> None:
    """Raise a `DataError` where a mixture has no such split."""
    if split not in ("train", "eval"):
        raise DataError(f"split is 'train' or 'eval', not {split!r}")
    if split == "eval" and not mixture.eval_informs and mixture.eval_fraction is None:
        raise DataError(
            "the mixture has no evaluation data: set mixture.eval_fraction, or mixture.eval_informs"
        )


def _tokens(inform: Inform, mixture: Mixture, encoder: Encoder, cache_dir: str) -> Tokens:
    source = open_source(inform, open_options(mixture, cache_dir))
    label = inform.label
    if mixture.pack_on_the_fly:
        found = list(_counted(transforms.documents(inform, source), inform))
        return LazyTokens(found, encoder, label)
    key = {
        "version": VERSION,
        "documents": transforms.fingerprint(inform, source),
        "encoder": encoder.fingerprint,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / name
    if (folder / "meta.json").exists():
        try:
            return TokenStore(folder)
        except DataError as error:
            log.warning("tokenizing %s again: %s", label, error)
    stream = _counted(transforms.documents(inform, source), inform)
    return write_store(
        folder,
        _with_progress(encoder.encode_all(stream, label), label),
        vocab_size=encoder.vocab_size,
        encoder=encoder.fingerprint,
        about={"inform": label, "key": key},
    )


def _counted(stream: Iterable[Document], inform: Inform) -> Iterator[Document]:
    """Pass documents on; it is an error if there was none."""
    count = 0
    for document in stream:
        count += 1
        yield document
    if not count:
        raise DataError(
            f"inform {inform.label!r} has no documents: there are no rows, or each is empty or "
            "was dropped by format_callback or preprocessing_fn"
        )


def _with_progress(batches: Iterable[Encoded], label: str) -> Iterator[Encoded]:
    """Show documents and tokens per second; tqdm keeps quiet where there is no terminal."""
    tokens = 0
    with tqdm(desc=f"tokenize {label}", unit=" docs", disable=None) as bar:
        for batch in batches:
            tokens += sum(map(len, batch[0]))
            bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            bar.update(len(batch[0]))
            yield batch
