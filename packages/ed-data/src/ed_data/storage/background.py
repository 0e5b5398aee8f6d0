"""Tokens of which the store is still being written: training need not wait for it.

The source is read over once, for the order of the documents. From then on the documents that a
batch needs are encoded when it needs them, while a thread writes the store from the first document
to the last; when it is complete, everything is read from there. The batches are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.order.mixing import IntArray
from ed_data.rows.documents import Tally
from ed_data.storage.lazy import LazyTokens
from ed_data.storage.store import TokenStore
from ed_data.tokens.encoder import Encoded

#: Passes the tokens of a store on, on their way into it.
Through = Callable[[Iterable[Encoded]], Iterable[Encoded]]
#: Documents that are encoded for batches at most: who asks for more waits for the store, which
#: encodes them in their order, and once.
AHEAD = 2**16


class GrowingTokens:
    """Tokens from a store as soon as it is complete. See `store.Tokens`.

    Args:
        lazy: the tokens until then.
        write: writes the store; it sends the tokens through its argument, which may end it.
    """

    def __init__(self, lazy: LazyTokens, write: Callable[[Through], TokenStore]) -> None:
        self._lazy, self.hashes, self.columns = lazy, lazy.hashes, lazy.columns
        self.digest = lazy.digest
        self._write, self._closed, self._users = write, False, 1
        self._store: Future[TokenStore] = Future()
        self._thread = threading.Thread(target=self._run, name="ed-data-store", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether the store is there."""
        return self._store.done() and self._store.exception() is None

    @property
    def tally(self) -> Tally:
        """What became of the rows, as far as it is known."""
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

    def shared(self) -> GrowingTokens | None:
        """These tokens for one user more; None where the writing has ended, well or not."""
        if self._closed or self._store.done():
            return None
        self._users += 1
        return self

    def close(self) -> None:
        """One user less; the last one ends the writing, and what was written is deleted."""
        self._users -= 1
        if self._users:
            return
        self._closed = True
        self._thread.join()

    def _tokens(self, more: int = 0) -> TokenStore | LazyTokens:
        """Where tokens are now.

        Raises:
            Exception: what the writing has met, such as a `DataError` of a later row.
        """
        if self._store.done() or self._lazy.encoded + more > AHEAD:
            return self._store.result()
        return self._lazy

    def _run(self) -> None:
        try:
            self._store.set_result(self._write(self._until_closed))
        except BaseException as error:  # whoever asks for tokens gets it
            self._store.set_exception(error)

    def _until_closed(self, batches: Iterable[Encoded]) -> Iterator[Encoded]:
        for batch in batches:
            if self._closed:
                raise DataError("the loader was closed while its cache was being written")
            yield batch
