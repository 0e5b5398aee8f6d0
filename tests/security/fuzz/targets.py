"""The seam of the fuzzers: a target has seeds, mutations, and a check of each outcome."""

from __future__ import annotations

import logging
import os
import random
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEEDS = Path(__file__).with_name("seeds")
#: Processor time of a case: a constant, and a part for each byte.
CPU_SECONDS, CPU_SECONDS_PER_BYTE = 10.0, 50e-6
#: Bytes by which the memory of the process may grow.
MAX_GROWTH = 2**29
#: Cases with new outcomes that are mutated further.
MAX_CORPUS = 2000


class Finding(AssertionError):
    """A case that a reader or a route does not withstand."""


def check(condition: object, problem: str) -> None:
    """Raise `Finding` unless a condition holds."""
    if not condition:
        raise Finding(problem)


class Target(ABC):
    """One reader or route.

    Attributes:
        name: name of the target and of its folder of seeds.
    """

    name: str

    def running(self, folder: Path) -> AbstractContextManager[object]:
        """Return a context in which cases can be executed.

        Args:
            folder: an empty folder.
        """
        return nullcontext()

    @abstractmethod
    def load_seeds(self) -> list[Any]:
        """Return the cases of the repository."""

    @abstractmethod
    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        """Return a new case."""

    @abstractmethod
    def execute(self, case: Any) -> str:
        """Execute a case, and return its outcome as a short text.

        Raises:
            Finding: the outcome is not allowed.
        """

    def size(self, case: Any) -> int:
        """Return the number of bytes of a case."""
        return len(case) if isinstance(case, bytes) else len(repr(case))


class ErrorLog(logging.Handler):
    """Collects the errors that a server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record, except of the client of MCP, which logs invalid replies of servers."""
        if record.name.partition(".")[0] in ("mcp", "client"):
            return
        self.texts.append(logging.Formatter().format(record))

    def __enter__(self) -> ErrorLog:
        self._loggers = [logging.getLogger(name) for name in (None, "uvicorn.error", "easydel")]
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)


@dataclass
class Summary:
    """What a fuzzer did.

    Attributes:
        cases: number of executed cases.
        outcomes: different outcomes.
    """

    cases: int = 0
    outcomes: set[str] = field(default_factory=set)


def fuzz(target: Target, folder: Path, seconds: float, seed: int = 0) -> Summary:
    """Execute the seeds of a target, then mutations of cases with different outcomes.

    Args:
        target: the target.
        folder: an empty folder.
        seconds: seconds after which the fuzzer ends.
        seed: seed of the random numbers.

    Raises:
        Finding: a case has an outcome that is not allowed. The case is in the folder `findings`.
    """
    rng, summary = random.Random(seed), Summary()
    corpus = target.load_seeds()
    assert corpus, "a target has seeds"
    with target.running(folder):
        for case in list(corpus):
            summary.outcomes.add(_run(target, case, folder))
            summary.cases += 1
        memory, end = _peak_memory(), time.monotonic() + seconds
        while time.monotonic() < end:
            case = target.mutate(rng, corpus)
            outcome = _run(target, case, folder)
            summary.cases += 1
            if outcome not in summary.outcomes:
                summary.outcomes.add(outcome)
                if len(corpus) < MAX_CORPUS and target.size(case) < 2**17:
                    corpus.append(case)
            growth = _peak_memory() - memory
            if growth > MAX_GROWTH:
                _store(case, folder)
                raise Finding(f"{target.name}: the memory grew by {growth >> 20} MiB")
    return summary


def _run(target: Target, case: Any, folder: Path) -> str:
    began = time.process_time()
    try:
        outcome = target.execute(case)
        used = time.process_time() - began
        limit = CPU_SECONDS + CPU_SECONDS_PER_BYTE * target.size(case)
        check(used < limit, f"{used:.1f} s of processor time")
    except Exception as error:
        path = _store(case, folder)
        if isinstance(error, Finding):
            raise Finding(f"{target.name}: {error}; the case is {path}") from error
        raise Finding(f"{target.name}: {error!r}; the case is {path}") from error
    return outcome


def _store(case: Any, folder: Path) -> Path:
    """Write a case, and return its path."""
    place = Path(os.environ.get("EASYDEL_FUZZ_FINDINGS") or folder / "findings")
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"case-{os.getpid()}-{len(list(place.iterdir()))}"
    path.write_bytes(case if isinstance(case, bytes) else repr(case).encode("utf-8", "replace"))
    return path


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_seeds(name: str) -> list[bytes]:
    """Return the content of the seed files of a target, in the order of their names."""
    return [path.read_bytes() for path in sorted((SEEDS / name).iterdir())]
