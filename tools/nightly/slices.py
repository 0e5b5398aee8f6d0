"""Choose the nightly tests of a commit: slices of equal seconds, with whole files where possible.

The tests are divided into parts. A part is the tests of one file (or of one `xdist_group`), or a
piece of them if they need more than `PART` seconds. The parts lie on a circle, at positions that a
hash of their names selects, and `COUNT` cuts divide the circle into slices of equal seconds. A new
result moves a cut slightly, so few tests change their slice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from tools.nightly.results import NEVER, Result

#: Number of slices. A prime number, so that each number of commits that land together reaches all.
COUNT = 31
#: Processes of a run, as in `pyproject.toml`.
PROCESSES = 2
#: Seconds after which a run of a slice starts no test, and seconds after which the run is ended.
LAST_START, LIMIT = 11 * 60, 15 * 60
#: Processor seconds of a slice: less than `PROCESSES * LAST_START`, because the collection takes
#: a minute and the two processes do not end together.
CAPACITY = 1080.0
#: Expected seconds of a test above which no slice contains it.
LONGEST = LAST_START - 120.0
#: Processor seconds of a file above which its tests are divided.
PART = 240.0
#: Share of a slice for tests that are not its own: new, failed and deferred tests.
URGENT_SHARE = 1 / 3


class Test(NamedTuple):
    """A nightly test that exists."""

    __test__ = False  # pytest collects no tests from this class

    id: str
    group: str
    """Tests of a group run in one process; by default, the path of the file."""


@dataclass(frozen=True)
class Part:
    """Tests of one group that run one after another."""

    name: str
    ids: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The tests of a slice."""

    number: int
    """Slice of the commit, from 0 to `COUNT - 1`."""
    ids: list[str]
    """Tests to run, in order."""
    seconds: dict[str, float]
    """Expected processor seconds of each test to run."""
    new: list[str] = field(default_factory=list)
    """Tests to run that have no entry in the file."""
    again: list[str] = field(default_factory=list)
    """Tests to run that failed or were deferred last time."""
    deferred: list[str] = field(default_factory=list)
    """Tests of this slice that do not fit, and urgent tests that wait."""
    too_long: list[str] = field(default_factory=list)
    """Tests that no slice can contain; the nightly workflow runs them."""


def make_plan(
    tests: Iterable[Test], results: Mapping[str, Result], number: int, capacity: float = CAPACITY
) -> Plan:
    """Return the tests that a commit runs.

    New tests come first, then tests that failed, then deferred tests, then the other tests of the
    slice.

    Args:
        tests: All nightly tests that exist.
        results: The last results, with those of unrecorded runs on this machine.
        number: Number of the commit.
        capacity: Processor seconds of a slice.
    """
    number %= COUNT
    tests = sorted(set(tests))
    estimates = estimate_seconds([test.id for test in tests], results)
    longest = min(capacity, LONGEST)
    too_long = [test.id for test in tests if estimates[test.id] > longest]
    parts = split_into_parts([t for t in tests if estimates[t.id] <= longest], estimates)
    slices = assign_slices(parts)
    urgency = {test.id: rank_urgency(results.get(test.id)) for test in tests}

    # Urgent tests of other slices; last those whose own slice comes next or has just run.
    distant = sorted(parts, key=lambda part: (slices[part.name] - number - COUNT // 2) % COUNT)
    urgent = [i for p in distant if slices[p.name] != number for i in p.ids if urgency[i] < 3]
    urgent, waiting = fit_tests(
        sorted(urgent, key=lambda i: urgency[i]), estimates, capacity * URGENT_SHARE
    )

    chosen, selected = [], set(urgent)
    for part in parts:
        ids = [i for i in part.ids if slices[part.name] == number or i in selected]
        if ids:  # a part with an urgent test comes early as a whole: its fixtures are built once
            chosen.append((min(urgency[i] for i in ids), part.name, ids))
    ordered = [i for _, _, ids in sorted(chosen) for i in sorted(ids, key=lambda i: urgency[i])]
    ids, beyond = fit_tests(ordered, estimates, capacity)
    return Plan(
        number=number,
        ids=ids,
        seconds={i: estimates[i] for i in ids},
        new=[i for i in ids if urgency[i] == 0],
        again=[i for i in ids if urgency[i] in (1, 2)],
        deferred=sorted([*beyond, *waiting]),
        too_long=too_long,
    )


def estimate_seconds(ids: Sequence[str], results: Mapping[str, Result]) -> dict[str, float]:
    """Return the expected processor seconds of each test.

    A test without a result is like the other cases of its function, else like the other tests of
    its file, else like the median of all.
    """
    known = {i: result.seconds for i, result in results.items() if result.commit != NEVER}
    groups: dict[str, list[float]] = {}
    for test, seconds in known.items():
        groups.setdefault(test.partition("[")[0], []).append(seconds)
        groups.setdefault(test.partition("::")[0], []).append(seconds)
    everything = statistics.median(known.values()) if known else 1.0
    means = {name: sum(group) / len(group) for name, group in groups.items()}

    def estimate(test: str) -> float:
        if test in known:
            return known[test]
        of_file = means.get(test.partition("::")[0], everything)
        return means.get(test.partition("[")[0], of_file)

    return {test: estimate(test) for test in ids}


def split_into_parts(tests: Sequence[Test], seconds: Mapping[str, float]) -> list[Part]:
    """Return the tests of each group, in pieces of about `PART` seconds."""
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault(test.group, []).append(test.id)
    parts = []
    for group, ids in groups.items():
        total = sum(seconds[i] for i in ids)
        count = max(1, math.ceil(total / PART))
        pieces: dict[int, list[str]] = {}
        before = 0.0
        for test in ids:
            middle = (before + seconds[test] / 2) / total if total else 0.0
            pieces.setdefault(min(int(count * middle), count - 1), []).append(test)
            before += seconds[test]
        parts += [
            Part(f"{group} {piece}", tuple(of), sum(seconds[i] for i in of))
            for piece, of in pieces.items()
        ]
    return sorted(parts, key=lambda part: part.name)


def assign_slices(parts: Iterable[Part]) -> dict[str, int]:
    """Return the slice of each part: slices of equal seconds of the circle of parts."""
    circle = sorted(parts, key=lambda part: blake2b(part.name.encode()).digest())
    # A part without seconds still has a length, so that such parts are spread too.
    lengths = [part.seconds + 0.01 for part in circle]
    total, before = sum(lengths), 0.0
    slices = {}
    for part, length in zip(circle, lengths, strict=True):
        slices[part.name] = int(COUNT * (before + length / 2) / total)
        before += length
    return slices


def rank_urgency(result: Result | None) -> int:
    """Return 0 for a new test, 1 after a failure, 2 for a deferred test, 3 for any other."""
    if result is None:
        return 0
    return {"failed": 1, "deferred": 2}.get(result.outcome, 3)


def fit_tests(
    ids: Iterable[str], seconds: Mapping[str, float], capacity: float
) -> tuple[list[str], list[str]]:
    """Return the tests that fit into a number of seconds, in their order, and the others."""
    fitting, beyond = [], []
    for test in ids:
        if seconds[test] <= capacity:
            capacity -= seconds[test]
            fitting.append(test)
        else:
            beyond.append(test)
    return fitting, beyond


def compare_entries(
    tests: Iterable[Test], results: Mapping[str, Result], skipped_files: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the tests without an entry, and the entries without a test.

    Args:
        tests: All nightly tests that were collected.
        results: The last results.
        skipped_files: Files that are not collected here, with the reasons: their tests exist.
    """
    existing = {test.id for test in tests}
    vanished = [
        i for i in results if i not in existing and i.partition("::")[0] not in skipped_files
    ]
    return sorted(existing - results.keys()), sorted(vanished)
