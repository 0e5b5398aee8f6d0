"""Tokens whose store a background thread is writing, so that training starts immediately.

The source is read once for the order of the documents. Until the store is complete, the documents
of a batch are encoded when the batch needs them, while a thread writes the store from the first
document to the last. Then all tokens are read from the store. The batches are the same in both
phases.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.documents import Tally
from ed_data.rows.example import RowMedium
from ed_data.storage.lazy import LazyTokens
from ed_data.storage.store import TokenStore
from ed_data.tokens.encoded import EncodedDocuments, IntArray

#: Wraps the iteration over the tokens that are written to a store.
Through = Callable[[Iterable[EncodedDocuments]], Iterable[EncodedDocuments]]
#: Maximum number of documents that are encoded for batches. Further requests wait for the store,
#: which encodes each document once.
AHEAD = 2**16


class BackgroundTokens:
    """Tokens of a store that is being written. See `store.Tokens`.

    Args:
        lazy: source of the tokens until the store is complete.
        write: writes the store; its argument wraps the iteration and can stop it.
    """

    def __init__(self, lazy: LazyTokens, write: Callable[[Through], TokenStore]) -> None:
        self._lazy, self.hashes, self.columns = lazy, lazy.hashes, lazy.columns
        self.digest, self.digests = lazy.digest, lazy.digests
        self._write, self._closed, self._users = write, False, 1
        self._store: Future[TokenStore] = Future()
        self._thread = threading.Thread(target=self._run, name="ed-data-store", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether the store is complete."""
        return self._store.done() and self._store.exception() is None

    @property
    def tally(self) -> Tally:
        """Statistics of the rows that have been read."""
        return self._store.result().tally if self.complete else self._lazy.tally

    def lengths(self, documents: IntArray, column: int | None = None) -> IntArray:
        """See `Tokens.lengths`."""
        return self._tokens(len(documents)).lengths(documents, column)

    def gather(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `Tokens.gather`."""
        return self._tokens().gather(documents, starts, counts, column)

    def values(
        self, documents: IntArray, starts: IntArray, counts: IntArray, column: int = 0
    ) -> NDArray[np.float32]:
        """See `Tokens.values`."""
        return self._tokens().values(documents, starts, counts, column)

    def media_counts(self, documents: IntArray) -> IntArray:
        """See `Tokens.media_counts`."""
        return self._lazy.media_counts(documents)

    def media(self, document: int) -> Sequence[RowMedium]:
        """See `Tokens.media`."""
        return self._lazy.media(document)

    def add_user(self) -> BackgroundTokens | None:
        """Register another user of these tokens; None if the writer has finished or failed."""
        if self._closed or self._store.done():
            return None
        self._users += 1
        return self

    def close(self) -> None:
        """Unregister a user. The last user stops the writer and deletes the partial store."""
        self._users -= 1
        if self._users:
            return
        self._closed = True
        self._thread.join()

    def _tokens(self, more: int = 0) -> TokenStore | LazyTokens:
        """Return the current source of tokens.

        Raises:
            Exception: the error of the writer, such as a `DataError` of a later row.
        """
        if self._store.done() or self._lazy.encoded + more > AHEAD:
            return self._store.result()
        return self._lazy

    def _run(self) -> None:
        try:
            self._store.set_result(self._write(self._until_closed))
        except BaseException as error:  # the next read of tokens raises the error
            self._store.set_exception(error)

    def _until_closed(self, batches: Iterable[EncodedDocuments]) -> Iterator[EncodedDocuments]:
        for batch in batches:
            if self._closed:
                raise DataError("the loader was closed while its cache was being written")
            yield batch
