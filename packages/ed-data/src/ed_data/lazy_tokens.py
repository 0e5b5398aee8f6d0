"""Tokens made when they are first asked for, in memory: what `pack_on_the_fly` reads from."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ed_data.store import digest_of
from ed_data.tokenize import Encoder
from ed_data.transforms import Document


class LazyTokens:
    """Documents held as they were read; each is encoded once, in batches. See `store.Tokens`."""

    def __init__(self, documents: list[Document], encoder: Encoder, label: str) -> None:
        self._documents, self._encoder, self._label = documents, encoder, label
        self._tokens: list[NDArray[Any] | None] = [None] * len(documents)
        self._masks: list[NDArray[Any] | None] = [None] * len(documents)
        self._lock = threading.Lock()
        self.hashes = np.array([document.digest for document in documents], np.uint64)
        self.has_loss_mask = encoder.assistant_only_loss

    @property
    def digest(self) -> str:
        """The same as that of a store on disk with these documents."""
        return digest_of(self.hashes, self._encoder.fingerprint)

    @property
    def encoded(self) -> int:
        """Number of documents that have been asked for so far."""
        return sum(tokens is not None for tokens in self._tokens)

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Tokens.lengths`."""
        return np.array([len(t) for t, _ in self._get(documents)], np.int64)

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
        """See `Tokens.gather`."""
        found = self._get(documents)
        parts = [slice(s, s + c) for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
        tokens = np.concatenate([t[part] for (t, _), part in zip(found, parts, strict=True)])
        mask = None
        if self.has_loss_mask:
            mask = np.concatenate([m[part] for (_, m), part in zip(found, parts, strict=True)])
            mask = mask.astype(bool)
        return tokens.astype(np.int32), mask

    def _get(self, documents: NDArray[np.int64]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        numbers = documents.tolist()
        with self._lock:
            missing = [n for n in dict.fromkeys(numbers) if self._tokens[n] is None]
            size = self._encoder.batch_size
            for at in range(0, len(missing), size):
                batch = missing[at : at + size]
                tokens, masks, _ = self._encoder.encode(
                    [self._documents[n] for n in batch], self._label
                )
                for i, n in enumerate(batch):
                    self._tokens[n] = tokens[i]
                    self._masks[n] = None if masks is None else masks[i]
        return [(self._tokens[n], self._masks[n]) for n in numbers]  # type: ignore[misc]
