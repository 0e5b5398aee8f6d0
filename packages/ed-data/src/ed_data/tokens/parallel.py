"""Encode documents in this process, or in `tokenization.num_proc` worker processes.

The tokens, their order and the dropped documents are the same in both cases.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from ed_data.rows.documents import Tally
from ed_data.rows.example import Example
from ed_data.tokens.encoded import EncodedDocuments
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.processes import Workers


class EncodingJob(NamedTuple):
    """Documents of one inform that are encoded together.

    Attributes:
        documents: at least one.
        label: name of the inform, for messages.
        tally: counts the documents that cannot be encoded, which then have no tokens; None raises
            their errors.
    """

    documents: list[Example]
    label: str
    tally: Tally | None = None


class Encoding:
    """An encoder and its worker processes.

    Args:
        encoder: encodes documents.
        processes: number of worker processes; None encodes in this process.
    """

    def __init__(self, encoder: Encoder, processes: int | None = None) -> None:
        self.encoder, self.processes = encoder, processes
        self._workers: Workers[EncodingJob, tuple[EncodedDocuments, Tally | None]] | None = None
        self._lock = threading.Lock()
        #: Callbacks that release other resources of the same loader.
        self.closing = ExitStack()

    def map(self, jobs: Iterable[EncodingJob]) -> Iterator[EncodedDocuments]:
        """Yield the tokens of each job in order; worker processes encode some jobs in advance.

        Raises:
            DataError: as `Encoder.encode`, or a process fails.
        """
        if self.processes is None:
            yield from (self.encoder.encode(*job) for job in jobs)
            return
        with self._lock:
            if self._workers is None:
                key = "tokenization.num_proc"
                self._workers = Workers(_Encode(self.encoder), self.processes, key)
            workers = self._workers
        tallies: list[Tally | None] = []

        def prepare_jobs() -> Iterator[EncodingJob]:
            for job in jobs:
                tallies.append(job.tally)
                yield job._replace(tally=None if job.tally is None else Tally())

        for encoded, tally in workers.map(prepare_jobs()):
            job_tally = tallies.pop(0)
            if job_tally is not None and tally is not None:
                job_tally.add(tally)
            yield encoded

    def all(
        self, documents: Iterable[Example], label: str, tally: Tally | None
    ) -> Iterator[EncodedDocuments]:
        """Yield the tokens of documents in batches, in order."""
        stream = iter(documents)

        def jobs() -> Iterator[EncodingJob]:
            while batch := list(islice(stream, self.encoder.batch_size)):
                yield EncodingJob(batch, label, tally)

        return self.map(jobs())

    def close(self) -> None:
        """Stop the worker processes and call the callbacks in `closing`."""
        self.closing.close()
        self.rest()

    def rest(self) -> None:
        """Stop the worker processes; the next job starts them again."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()


class _Encode:
    """The function that worker processes apply to jobs."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __call__(self, job: EncodingJob) -> tuple[EncodedDocuments, Tally | None]:
        return self._encoder.encode(*job), job.tally
