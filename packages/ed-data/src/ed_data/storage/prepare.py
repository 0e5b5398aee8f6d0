"""Tokens of the informs of a mixture: from the cache, or tokenized now."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ed_data.cache import remove_abandoned
from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.rows.documents import Documents, Tally, fingerprint_documents
from ed_data.rows.splits import (
    at_least_one,
    file_cache,
    no_documents,
    prefix_error_path,
    split_members,
)
from ed_data.sources import open_source
from ed_data.storage.background import BackgroundTokens, Through
from ed_data.storage.lazy import LazyTokens, ReadAgain
from ed_data.storage.store import STORE_VERSION, StoredTokens, StorePart, TokenStore, write_store
from ed_data.tokens.encoded import EncodedDocuments
from ed_data.tokens.parallel import Encoding

log = logging.getLogger("ed_data")
#: Size in bytes from which the store of a source is written in the background.
BACKGROUND_BYTES = 2**26
#: Stores that this process is writing in the background, by folder.
_WRITING: WeakValueDictionary[Path, BackgroundTokens] = WeakValueDictionary()


def prepare_tokens(
    mixture: Mixture, encoding: Encoding, split: str, cache_dir: str, *, wait: bool = True
) -> list[StorePart]:
    """Return the tokens of a split's documents, from the cache if they are stored there.

    Args:
        mixture: the sources.
        encoding: encodes documents.
        split: `"train"` or `"eval"`.
        cache_dir: folder of the stores.
        wait: return when all stores are complete. Otherwise the stores of large sources are written
            in the background until `encoding` is closed.

    Raises:
        DataError: a source is missing or empty, or the split is.
    """

    exclusion = None
    if mixture.exclude is not None and split == "train":
        from ed_data.rows.exclusion import Exclusion  # read by runs with the key only

        exclusion = Exclusion.read(mixture.exclude)

    def tokens(key: str, number: int) -> tuple[StorePart, NDArray[np.uint64], NDArray[np.uint64]]:
        inform = getattr(mixture, key)[number]
        with prefix_error_path(key, number):
            store = _tokens(inform, mixture, encoding, cache_dir, wait)
            report(inform.label, store.tally)
            digests = excluded = None
            if exclusion is not None:
                digests = store.digests
                if digests is None:
                    documents = _open_documents(inform, mixture, encoding, cache_dir)
                    digests = np.fromiter((one.digest for one in documents), np.uint64)
                excluded = exclusion.mark(digests)
        part = StorePart(inform.label, store, np.empty(0, np.int64), excluded, digests)
        return part, store.hashes, store.hashes

    members = split_members(mixture, split, tokens)
    if exclusion is not None:
        exclusion.check_complete()
    return _distinct([replace(part, members=member_numbers) for part, _, member_numbers in members])


def _distinct(parts: list[StorePart]) -> list[StorePart]:
    """Number the parts whose informs have the same name, because statistics are keyed by name."""
    seen: Counter[str] = Counter()
    result = []
    for part in parts:
        seen[part.label] += 1
        number = seen[part.label]
        label = part.label if number == 1 else f"{part.label} ({number})"
        result.append(replace(part, label=label))
    return result


def _open_documents(
    inform: Inform, mixture: Mixture, encoding: Encoding, cache_dir: str
) -> Documents:
    source = open_source(inform, file_cache(mixture, cache_dir))
    return Documents(inform, source, encoding.encoder.schema, media=mixture.media)


def _tokens(
    inform: Inform, mixture: Mixture, encoding: Encoding, cache_dir: str, wait: bool
) -> StoredTokens:
    encoder = encoding.encoder
    label, schema = inform.label, encoder.schema
    documents = _open_documents(inform, mixture, encoding, cache_dir)
    source = documents.source
    if mixture.pack_on_the_fly:
        return _lazy(documents, encoding)
    key = {
        "version": STORE_VERSION,
        "documents": fingerprint_documents(inform, source, schema),
        "encoder": encoder.fingerprint,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / name
    writing = _WRITING.get(folder)
    if writing is not None and not wait and (shared := writing.add_user()) is not None:
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
        batches = encoding.all(at_least_one(documents), label, skip)
        return write_store(
            folder,
            through(_with_progress(batches, label)),
            vocab_size=encoder.vocab_size,
            encoder=encoder.fingerprint,
            about={"inform": label, "key": key},
            columns=len(schema.columns),
            tally=documents.tally,
        )

    if wait or sum(documents.shards) < BACKGROUND_BYTES:
        return write(documents, encoding, iter)

    def write_in_background(through: Through) -> TokenStore:
        # A tokenizer is not thread-safe, so the thread uses a copy.
        thread_encoder = replace(encoder, tokenizer=copy.deepcopy(encoder.tokenizer))
        with contextlib.closing(Encoding(thread_encoder, encoding.processes)) as background:
            thread_documents = Documents(inform, source, schema, media=mixture.media)
            return write(thread_documents, background, through)

    writing = _WRITING[folder] = BackgroundTokens(_lazy(documents, encoding), write_in_background)
    encoding.closing.callback(writing.close)
    return writing


def _lazy(documents: Documents, encoding: Encoding) -> LazyTokens:
    inform = documents.inform
    skip = inform.on_error == "skip"
    tokens = LazyTokens(ReadAgain(documents), encoding, inform.label, documents.tally, skip)
    if not len(tokens.hashes):
        raise no_documents(documents)
    return tokens


def report(label: str, tally: Tally) -> None:
    """Log the dropped rows of an inform and the reasons."""
    if tally.dropped:
        is_requested = all(reason.startswith("dropped by") for reason in tally.dropped)
        level = logging.INFO if is_requested else logging.WARNING
        log.log(level, "inform %s: dropped some of %d rows: %s", label, tally.rows, tally)


def _with_progress(batches: Iterable[EncodedDocuments], label: str) -> Iterator[EncodedDocuments]:
    """Show documents and tokens per second; tqdm is silent without a terminal."""
    tokens = 0
    with tqdm(desc=f"tokenize {label}", unit=" docs", disable=None) as bar:
        for batch in batches:
            tokens += sum(map(len, batch.tokens))
            bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens", refresh=False)
            bar.update(len(batch.digests))
            yield batch
