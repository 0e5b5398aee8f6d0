"""From options to tokens: open the informs, tokenize those that are not cached, hold out a part.

A document is held out by the hash of its content, so the split depends on neither the seed, the
tokenizer nor the order of files, and equal documents are always on the same side.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ed_data.cache import remove_abandoned
from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.order.mixing import IntArray
from ed_data.rows import documents as transforms
from ed_data.rows.documents import Documents, Tally
from ed_data.schema import TEXT, Content, Example, Schema
from ed_data.sources import open_source
from ed_data.sources.files import FileCache
from ed_data.storage.background import GrowingTokens, Through
from ed_data.storage.lazy import LazyTokens, ReadAgain
from ed_data.storage.store import VERSION, Part, Tokens, TokenStore, write_store
from ed_data.tokens.encoder import Encoded
from ed_data.tokens.parallel import Encoding

T = TypeVar("T")
log = logging.getLogger("ed_data")
#: Bytes of a source from which on training does not wait for its store.
ASIDE = 2**26
#: Stores that are being written by this process, by their folder.
_GROWING: WeakValueDictionary[Path, GrowingTokens] = WeakValueDictionary()


def default_cache_dir() -> str:
    """Where caches go unless told otherwise: `$ED_DATA_CACHE`, else in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("ED_DATA_CACHE") or os.path.join(home, "ed-data")


def prepare(
    mixture: Mixture, encoding: Encoding, split: str, cache_dir: str, *, wait: bool = True
) -> list[Part]:
    """Return the documents of a split as tokens, from the cache where they are there.

    Args:
        mixture: the sources.
        encoding: makes the tokens.
        split: `"train"` or `"eval"`.
        cache_dir: where stores are.
        wait: for stores to be complete; else those of large sources are written on the side, until
            `encoding` is closed.

    Raises:
        DataError: a source is missing or empty, or the split is.
    """

    def tokens(key: str, number: int) -> tuple[Part, NDArray[np.uint64], NDArray[np.uint64]]:
        inform = getattr(mixture, key)[number]
        with named(key, number):
            store = _tokens(inform, mixture, encoding, cache_dir, wait)
            report(inform.label, store.tally)
        return Part(inform.label, store, np.empty(0, np.int64)), store.hashes, store.hashes

    members = split_members(mixture, split, tokens)
    return _distinct([replace(part, members=chosen) for part, _, chosen in members])


def split_members(
    mixture: Mixture,
    split: str,
    read: Callable[[str, int], tuple[T, NDArray[np.uint64], NDArray[np.uint64]]],
) -> list[tuple[T, NDArray[np.uint64], IntArray]]:
    """Choose the documents of a split.

    Args:
        mixture: says what is held out.
        split: `"train"` or `"eval"`.
        read: from `("informs", 0)` to anything, the digests of its documents, and those of their
            contents.

    Returns:
        For each inform with documents in the split: the thing, the digests, and the numbers of the
        documents.
    """
    check_split(mixture, split)
    chosen: list[tuple[T, NDArray[np.uint64], IntArray]] = []
    if split == "train" or mixture.eval_fraction is not None:
        found = [read("informs", number) for number in range(len(mixture.informs))]
        masks = [np.zeros(len(hashes), bool) for _, _, hashes in found]
        if mixture.eval_fraction is not None:
            masks = held_out([hashes for _, _, hashes in found], mixture.eval_fraction)
        for inform, (thing, digests, _), mask in zip(mixture.informs, found, masks, strict=True):
            members = np.flatnonzero(mask if split == "eval" else ~mask)
            if len(members):
                chosen.append((thing, digests, members))
            elif split == "train" and mixture.mixture_weights is not None:
                raise DataError(
                    f"inform {inform.label!r} has a weight, and all of its documents are held out "
                    f"by eval_fraction {mixture.eval_fraction}",
                    ("eval_fraction",),
                )
    if split == "eval":
        for number in range(len(mixture.eval_informs)):
            thing, digests, hashes = read("eval_informs", number)
            chosen.append((thing, digests, np.arange(len(hashes))))
    return chosen


@contextmanager
def named(*path: str | int) -> Iterator[None]:
    """Complete the key of an error: the keys of an inform know nothing of the mixture around it."""
    try:
        yield
    except DataError as error:
        error.path = (*path, *error.path)
        raise


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


def held_out(hashes: Sequence[NDArray[np.uint64]], fraction: float) -> list[NDArray[np.bool_]]:
    """Choose the held-out documents of several informs.

    Of each inform the share `fraction` (rounded) with the smallest hashes is held out; at least
    one document in all.

    Args:
        hashes: per inform, the content hash of each document.
        fraction: share of documents, between 0 and 1.

    Returns:
        Per inform a mask: True where the document is held out.

    Raises:
        DataError: one side would be empty.
    """
    counts = [round(fraction * len(h)) for h in hashes]
    if not any(counts) and any(len(h) for h in hashes):
        counts[int(np.argmax([len(h) for h in hashes]))] = 1
    chosen = [np.sort(h)[:count] for h, count in zip(hashes, counts, strict=True)]
    # A copy of a held-out document is held out too, wherever it is.
    all_chosen = np.unique(np.concatenate(chosen)) if chosen else np.empty(0, np.uint64)
    masks = [np.isin(h, all_chosen) for h in hashes]
    total = sum(len(m) for m in masks)
    held = sum(int(m.sum()) for m in masks)
    if held == 0 or held == total:
        side = "evaluation" if held == 0 else "training"
        raise DataError(
            f"eval_fraction {fraction} leaves no document for {side}: there are {total} documents, "
            f"of which {held} would be held out (equal documents stay together); take more "
            "documents, another fraction, or eval_informs",
            ("eval_fraction",),
        )
    return masks


def contents(
    mixture: Mixture, split: str = "train", cache_dir: str | None = None, schema: Schema = TEXT
) -> Iterator[Content]:
    """Yield the contents (texts, messages, ids) of a split's documents, inform after inform.

    Without a tokenizer: to train one on the training documents alone, or to evaluate on the
    held-out text as it was written. Of several fields, the content is the first.

    Raises:
        DataError: as `prepare`.
    """
    return (document.content for document in _documents(mixture, split, cache_dir, schema))


def texts(
    mixture: Mixture, split: str = "train", cache_dir: str | None = None, schema: Schema = TEXT
) -> Iterator[str]:
    """Yield each field of a split's documents as text; of chats, each message's text.

    Token ids have no text, and are left out.
    """
    for document in _documents(mixture, split, cache_dir, schema):
        for content in document.fields.values():
            if isinstance(content, str):
                yield content
                continue
            for message in content:
                if isinstance(message, str):  # a step of an answer
                    yield message
                elif isinstance(message, dict) and isinstance(message["content"], str):
                    yield message["content"]


def _documents(
    mixture: Mixture, split: str, cache_dir: str | None, schema: Schema
) -> Iterator[Example]:
    check_split(mixture, split)
    folder = file_cache(mixture, cache_dir or mixture.cache_dir or default_cache_dir())

    def read(key: str, number: int) -> Iterator[Example]:
        with named(key, number):
            yield from read_documents(getattr(mixture, key)[number], folder, schema)

    informs = range(len(mixture.informs))
    if mixture.eval_fraction is not None:
        hashes = [
            np.fromiter((document.content_digest for document in read("informs", i)), np.uint64)
            for i in informs
        ]
        for i, mask in enumerate(held_out(hashes, mixture.eval_fraction)):
            for document, is_held_out in zip(read("informs", i), mask, strict=True):
                if is_held_out == (split == "eval"):
                    yield document
    elif split == "train":
        for i in informs:
            yield from read("informs", i)
    if split == "eval":
        for i in range(len(mixture.eval_informs)):
            yield from read("eval_informs", i)


def check_split(mixture: Mixture, split: str) -> None:
    """Raise a `DataError` where a mixture has no such split."""
    if split not in ("train", "eval"):
        raise DataError(f"split is 'train' or 'eval', not {split!r}")
    if split == "eval" and not mixture.eval_informs and mixture.eval_fraction is None:
        raise DataError(
            "the mixture has no evaluation data: set mixture.eval_fraction or mixture.eval_informs",
            ("eval_fraction",),
        )


def file_cache(mixture: Mixture, cache_dir: str) -> FileCache:
    """Return how remote files are read, and where copies of them are kept."""
    keep = mixture.cache_remote_files and not (mixture.pack_on_the_fly or mixture.streaming)
    return FileCache(
        os.path.join(cache_dir, "files") if keep else None,
        mixture.cloud_max_retries,
        mixture.cloud_retry_delay,
        mixture.cache_expiry_seconds,
        mixture.streaming,
    )


def read_documents(inform: Inform, files: FileCache, schema: Schema) -> Iterator[Example]:
    """Yield the documents of an inform; it is an error if there are none."""
    return _counted(Documents(inform, open_source(inform, files), schema))


def _tokens(
    inform: Inform, mixture: Mixture, encoding: Encoding, cache_dir: str, wait: bool
) -> Tokens:
    encoder = encoding.encoder
    source = open_source(inform, file_cache(mixture, cache_dir))
    label, schema = inform.label, encoder.schema
    documents = Documents(inform, source, schema)
    if mixture.pack_on_the_fly:
        return _lazy(documents, encoding)
    key = {
        "version": VERSION,
        "documents": transforms.fingerprint(inform, source, schema),
        "encoder": encoder.fingerprint,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / name
    growing = _GROWING.get(folder)
    if growing is not None and not wait and (shared := growing.shared()) is not None:
        encoding.closing.callback(shared.close)
        return shared
    remove_abandoned(folder.parent)
    if (folder / "meta.json").exists():
        try:
            return TokenStore(folder)
        except DataError as error:
            log.warning("tokenizing %s again: %s", label, error)

    def write(documents: Documents, encoding: Encoding, through: Through) -> TokenStore:
        skip = documents.tally if inform.on_error == "skip" else None
        batches = encoding.all(_counted(documents), label, skip)
        return write_store(
            folder,
            through(_with_progress(batches, label)),
            vocab_size=encoder.vocab_size,
            encoder=encoder.fingerprint,
            about={"inform": label, "key": key},
            columns=len(schema.columns),
            tally=documents.tally,
        )

    if wait or sum(documents.shards) < ASIDE:
        documents.check_first_row()
        return write(documents, encoding, iter)

    def write_aside(through: Through) -> TokenStore:
        # A tokenizer of its own: one that is in use cannot be used by another thread.
        own = replace(encoder, tokenizer=copy.deepcopy(encoder.tokenizer))
        with contextlib.closing(Encoding(own, encoding.processes)) as aside:
            return write(Documents(inform, source, schema), aside, through)

    growing = _GROWING[folder] = GrowingTokens(_lazy(documents, encoding), write_aside)
    encoding.closing.callback(growing.close)
    return growing


def _lazy(documents: Documents, encoding: Encoding) -> LazyTokens:
    documents.check_first_row()
    inform = documents.inform
    skip = inform.on_error == "skip"
    tokens = LazyTokens(ReadAgain(documents), encoding, inform.label, documents.tally, skip)
    if not len(tokens.hashes):
        raise _no_documents(documents)
    return tokens


def _counted(documents: Documents) -> Iterator[Example]:
    """Pass documents on; it is an error if there are none."""
    count = 0
    for document in documents:
        count += 1
        yield document
    if not count:
        raise _no_documents(documents)


def report(label: str, tally: Tally) -> None:
    """Say what was left out of an inform, and why."""
    if tally.dropped:
        asked = all(reason.startswith("dropped by") for reason in tally.dropped)
        level = logging.INFO if asked else logging.WARNING
        log.log(level, "inform %s: of %d rows left out: %s", label, tally.rows, tally)


def _no_documents(documents: Documents) -> DataError:
    reason = str(documents.tally) if documents.tally.rows else "there are no rows"
    return DataError(
        f"inform {documents.inform.label!r} has no documents: {reason}; a row becomes a document "
        "unless it is empty or was dropped by format_callback or preprocessing_fn"
    )


def _with_progress(batches: Iterable[Encoded], label: str) -> Iterator[Encoded]:
    """Show documents and tokens per second; tqdm keeps quiet where there is no terminal."""
    tokens = 0
    with tqdm(desc=f"tokenize {label}", unit=" docs", disable=None) as bar:
        for batch in batches:
            tokens += sum(map(len, batch.tokens))
            bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            bar.update(len(batch.digests))
            yield batch
