"""The training and evaluation documents of a mixture.

A document is held out by the hash of its content. The split therefore does not depend on the seed,
the tokenizer or the order of the files, and equal documents are always in the same split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ed_data.config import Inform, Media, Mixture
from ed_data.errors import DataError
from ed_data.rows.documents import Documents
from ed_data.rows.example import Example
from ed_data.schema import TEXT, Content, Schema
from ed_data.sources import open_source
from ed_data.sources.files import FileCache

T = TypeVar("T")


def default_cache_dir() -> str:
    """Return the default cache folder: `$ED_DATA_CACHE`, else `ed-data` in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("ED_DATA_CACHE") or os.path.join(home, "ed-data")


def check_split(mixture: Mixture, split: str) -> None:
    """Raise a `DataError` if the mixture does not have the split."""
    if split not in ("train", "eval"):
        raise DataError(f"split must be 'train' or 'eval', got {split!r}")
    if split == "eval" and not mixture.eval_informs and mixture.eval_fraction is None:
        raise DataError(
            "the mixture has no evaluation data: set mixture.eval_fraction or mixture.eval_informs",
            ("eval_fraction",),
        )


def split_members(
    mixture: Mixture,
    split: str,
    read: Callable[[str, int], tuple[T, NDArray[np.uint64], NDArray[np.uint64]]],
) -> list[tuple[T, NDArray[np.uint64], NDArray[np.int64]]]:
    """Select the documents of a split.

    Args:
        mixture: the options `eval_fraction`, `informs` and `eval_informs`.
        split: `"train"` or `"eval"`.
        read: maps the key of an inform, such as `("informs", 0)`, to any object, the digests of its
            documents, and the digests of their contents.

    Returns:
        For each inform with documents in the split: the object, the digests, and the numbers of the
        documents.
    """
    check_split(mixture, split)
    selections: list[tuple[T, NDArray[np.uint64], NDArray[np.int64]]] = []
    if split == "train" or mixture.eval_fraction is not None:
        sources = [read("informs", number) for number in range(len(mixture.informs))]
        masks = [np.zeros(len(hashes), bool) for _, _, hashes in sources]
        if mixture.eval_fraction is not None:
            masks = held_out([hashes for _, _, hashes in sources], mixture.eval_fraction)
        for inform, (thing, digests, _), mask in zip(mixture.informs, sources, masks, strict=True):
            members = np.flatnonzero(mask if split == "eval" else ~mask)
            if len(members):
                selections.append((thing, digests, members))
            elif split == "train" and mixture.weights is not None:
                raise DataError(
                    f"inform {inform.label!r} has a weight, but eval_fraction "
                    f"{mixture.eval_fraction} holds out all of its documents",
                    ("eval_fraction",),
                )
    if split == "eval":
        for number in range(len(mixture.eval_informs)):
            thing, digests, hashes = read("eval_informs", number)
            selections.append((thing, digests, np.arange(len(hashes))))
    return selections


def held_out(hashes: Sequence[NDArray[np.uint64]], fraction: float) -> list[NDArray[np.bool_]]:
    """Select the held-out documents of several informs.

    Of each inform, the share `fraction` (rounded) with the smallest hashes is held out. At least
    one document is held out in total.

    Args:
        hashes: per inform, the content hash of each document.
        fraction: share of the documents, between 0 and 1.

    Returns:
        Per inform a mask [documents]: True for held-out documents.

    Raises:
        DataError: one of the two splits would be empty.
    """
    counts = [round(fraction * len(h)) for h in hashes]
    if not any(counts) and any(len(h) for h in hashes):
        counts[int(np.argmax([len(h) for h in hashes]))] = 1
    smallest_hashes = [np.sort(h)[:count] for h, count in zip(hashes, counts, strict=True)]
    # Copies of a held-out document are held out in every inform.
    all_chosen = (
        np.unique(np.concatenate(smallest_hashes)) if smallest_hashes else np.empty(0, np.uint64)
    )
    masks = [np.isin(h, all_chosen) for h in hashes]
    total = sum(len(m) for m in masks)
    held_count = sum(int(m.sum()) for m in masks)
    if held_count == 0 or held_count == total:
        side = "evaluation" if held_count == 0 else "training"
        raise DataError(
            f"eval_fraction {fraction} selects no document for {side}: {held_count} of {total} "
            "documents "
            "would be held out (equal documents stay together); add documents, change the "
            "fraction, or set eval_informs",
            ("eval_fraction",),
        )
    return masks


def choose_schema(mixture: Mixture, schema: Schema, files: FileCache | None = None) -> Schema:
    """Return the schema of prompts and completions if rows for the schema of texts have both.

    Otherwise, check that the method reads what the first rows can teach. The first row of each
    source is read once.

    Args:
        mixture: the sources.
        schema: the schema that the method requires.
        files: see `file_cache`.

    Raises:
        DataError: a source cannot be read, or see `Documents.check_first_row`.
    """
    if schema.kind.other_schema is None:
        return schema
    opened: list[tuple[str, int, Documents]] = []
    for key in ("informs", "eval_informs"):
        for number, inform in enumerate(getattr(mixture, key)):
            with prefix_error_path(key, number):
                source = open_source(inform, files)
                documents = Documents(inform, source, schema, media=mixture.media)
                if documents.has_completions():
                    return schema.kind.other_schema
                opened.append((key, number, documents))
    for key, number, documents in opened:
        with prefix_error_path(key, number):
            documents.check_first_row()
    return schema


def in_split(split: str, fraction: float | None) -> Callable[[Example], bool]:
    """Return a test whether a streamed document belongs to a split.

    An indexed mixture holds out exactly `fraction` of the documents. A stream holds out each
    document with that probability, by the hash of its content.
    """
    limit = 0 if fraction is None else int(fraction * 2**64)
    if split == "eval" and fraction is not None:
        return lambda example: example.content_digest < limit
    if split == "eval" or not limit:
        return lambda example: True
    return lambda example: example.content_digest >= limit


def contents(
    mixture: Mixture, split: str = "train", cache_dir: str | None = None, schema: Schema = TEXT
) -> Iterator[Content]:
    """Yield the contents (texts, messages, ids) of a split's documents, inform after inform.

    No tokenizer is needed. Use the training split to train a tokenizer, and the evaluation split to
    evaluate on the original text. The content of a document with several fields is the first field.

    Raises:
        DataError: the split does not exist, or a row is invalid.
    """
    return (document.content for document in _documents(mixture, split, cache_dir, schema))


def texts(
    mixture: Mixture, split: str = "train", cache_dir: str | None = None, schema: Schema = TEXT
) -> Iterator[str]:
    """Yield each field of a split's documents as text; for chats, the text of each message.

    Token ids have no text and are omitted.
    """
    for document in _documents(mixture, split, cache_dir, schema):
        for content in document.fields.values():
            if isinstance(content, str):
                yield content
                continue
            for message in content:
                if isinstance(message, str):  # a step of an answer
                    yield message
                elif isinstance(message, dict) and isinstance(message.get("content"), str):
                    yield message["content"]


def _documents(
    mixture: Mixture, split: str, cache_dir: str | None, schema: Schema
) -> Iterator[Example]:
    """Yield the documents of a split that are not excluded."""
    documents = _split_documents(mixture, split, cache_dir, schema)
    if mixture.exclude is None or split != "train":
        return documents
    from ed_data.rows.exclusion import read_hashes  # read by runs with the key only

    excluded = set(read_hashes(mixture.exclude).tolist())
    return (document for document in documents if document.digest not in excluded)


def _split_documents(
    mixture: Mixture, split: str, cache_dir: str | None, schema: Schema
) -> Iterator[Example]:
    check_split(mixture, split)
    folder = file_cache(mixture, cache_dir or mixture.cache_dir or default_cache_dir())
    schema = choose_schema(mixture, schema, folder)

    def read(key: str, number: int) -> Iterator[Example]:
        with prefix_error_path(key, number):
            inform = getattr(mixture, key)[number]
            yield from read_documents(inform, folder, schema, mixture.media)

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


def read_documents(
    inform: Inform, files: FileCache, schema: Schema, media: Media
) -> Iterator[Example]:
    """Yield the documents of an inform; raise a `DataError` if there are none."""
    return at_least_one(Documents(inform, open_source(inform, files), schema, media=media))


def at_least_one(documents: Documents) -> Iterator[Example]:
    """Yield the documents; raise a `DataError` if there are none."""
    count = 0
    for document in documents:
        count += 1
        yield document
    if not count:
        raise no_documents(documents)


def no_documents(documents: Documents) -> DataError:
    """Return the error of an inform without documents."""
    reason = str(documents.tally) if documents.tally.rows else "the source has no rows"
    return DataError(
        f"inform {documents.inform.label!r} has no documents: {reason}; each row becomes a "
        "document unless it is empty or format_callback or preprocessing_fn dropped it"
    )


def file_cache(mixture: Mixture, cache_dir: str) -> FileCache:
    """Return how remote files are read and where their copies are stored."""
    keep = mixture.cache_remote_files and not (mixture.pack_on_the_fly or mixture.streaming)
    return FileCache(
        os.path.join(cache_dir, "files") if keep else None,
        mixture.cloud_max_retries,
        mixture.cloud_retry_delay,
        mixture.cache_expiry_seconds,
        mixture.streaming,
    )


@contextmanager
def prefix_error_path(*path: str | int) -> Iterator[None]:
    """Prepend the key of an inform to the path of a `DataError`."""
    try:
        yield
    except DataError as error:
        error.path = (*path, *error.path)
        raise
