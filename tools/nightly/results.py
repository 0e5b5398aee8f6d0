"""The last result of each nightly test, in `tests/nightly/results.tsv`.

A line without a tab is a file. Each other line has columns, separated by tabs:

    the start of an id    the commit, and the outcome unless the test passed    the cases

A case is the rest of an id without `]`, a space, and seconds. Ids that are equal up to the last
`: ` of their case share a line if commit and outcome are equal, so the file stays small and a new
result changes few lines. A line that starts with `[` continues the function of the line before.
The commit `-` means that a test is known and has no result.

Seconds are processor seconds of a test and of the processes that it waited for, because a busy
machine does not change them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tools.workspace import ROOT

PATH = ROOT / "tests/nightly/results.tsv"
#: Results of runs on this machine that `record` has not yet added to the file.
LOG = ROOT / ".cache/nightly/log.jsonl"
#: The commit of a test without a result.
NEVER = "-"
COMMIT = re.compile(r"[0-9a-f]{8}|-")
OUTCOME = re.compile(r"passed|failed|deferred|xfailed|skipped: [^\t\n]+")
#: Characters of a stored reason.
REASON = 120


class Result(NamedTuple):
    """The last result of a test."""

    commit: str
    """Eight digits of the commit, or `NEVER`."""
    seconds: float
    """Processor seconds of setup, call and teardown."""
    outcome: str = "passed"
    """`passed`, `failed`, `xfailed`, `deferred` (only in a log) or `skipped: <reason>`."""


def format_results(results: Mapping[str, Result]) -> str:
    """Return the text of the file."""
    files: dict[str, dict[tuple[str, str], list[str]]] = {}
    for test, result in sorted(results.items()):
        file, _, name = test.partition("::")
        stem = split_stem(name)
        commit = " ".join([result.commit, *([result.outcome] * (result.outcome != "passed"))])
        rest = name[len(stem) :].removesuffix("]")
        case = f"{rest} {format_seconds(result.seconds)}"
        files.setdefault(file, {}).setdefault((stem, commit), []).append(case)
    lines = []
    for file, groups in files.items():
        lines.append(file)
        previous = ""
        for (stem, commit), cases in sorted(groups.items()):
            function, bracket, row = stem.partition("[")
            name = bracket + row if function == previous and bracket else stem
            lines.append("\t".join([name, commit, *cases]))
            previous = function
    return "".join(f"{line}\n" for line in lines)


def split_stem(name: str) -> str:
    """Return the part of a test's name that cases of one line share."""
    function, bracket, case = name.partition("[")
    row, separator, _ = case.rpartition(": ")
    return function + bracket + row + separator


def format_seconds(seconds: float) -> str:
    """Return seconds with at most one decimal."""
    return f"{seconds:.1f}".removesuffix(".0") if seconds < 10 else f"{seconds:.0f}"


def parse_results(text: str) -> dict[str, Result]:
    """Return the results of a text that `format_results` wrote.

    Raises:
        ValueError: A line is damaged; the message contains its number.
    """
    results: dict[str, Result] = {}
    file = function = ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            if line.startswith(("<<<<<<<", "=======", ">>>>>>>")):
                raise ValueError(f"{line[:20]!r} is a mark of a conflict: resolve it")
            if "\t" not in line:
                file, function = line, ""
                continue
            if line.startswith("["):
                line = function + line
            function = line.partition("\t")[0].partition("[")[0]
            for test, result in parse_line(file, line):
                if test in results:
                    raise ValueError(f"{test} is listed twice: keep one of its results")
                results[test] = result
        except ValueError as error:
            raise ValueError(f"{PATH.name}, line {number}: {error}") from None
    return results


def parse_line(file: str, line: str) -> Iterable[tuple[str, Result]]:
    """Yield the tests of a line with their results."""
    if not file:
        raise ValueError("no file stands before this test: add the path of its file")
    stem, *columns = line.split("\t")
    if stem.startswith("["):
        raise ValueError("no function stands before these cases: add its name")
    if len(columns) < 2:
        raise ValueError("a test needs the columns name, commit and cases")
    commit, _, outcome = columns[0].partition(" ")
    outcome = outcome or "passed"
    if not COMMIT.fullmatch(commit) or not OUTCOME.fullmatch(outcome):
        raise ValueError(f"{columns[0]!r} must be a commit of eight digits, and an outcome")
    for case in columns[1:]:
        rest, _, seconds = case.rpartition(" ")
        if not re.fullmatch(r"\d+(\.\d)?", seconds):
            raise ValueError(f"{case!r} must end with a space and seconds")
        bracket = "]" if "[" in stem else ""
        yield f"{file}::{stem}{rest}{bracket}", Result(commit, float(seconds), outcome)


def read_results(path: Path = PATH) -> dict[str, Result]:
    """Return the stored results; none if the file does not exist."""
    return parse_results(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_results(results: Mapping[str, Result], path: Path = PATH) -> None:
    """Replace the stored results."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(format_results(results), encoding="utf-8")
    partial.replace(path)


def read_log(path: Path = LOG, start: int = 0) -> dict[str, Result]:
    """Return the last result of each test in a log, from a line on.

    A line that a killed run cut is ignored.
    """
    results: dict[str, Result] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines[start:]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        results[entry["id"]] = Result(entry["commit"], entry["seconds"], entry["outcome"])
    return results


def merge_results(old: Mapping[str, Result], new: Mapping[str, Result]) -> dict[str, Result]:
    """Return the old results, replaced by the new ones.

    A deferred test keeps its old result. A skipped test keeps the seconds of its last run.
    """
    merged = dict(old)
    for test, result in new.items():
        if result.outcome == "deferred":
            continue
        if result.outcome.startswith("skipped") and test in old:
            result = result._replace(seconds=max(result.seconds, old[test].seconds))
        merged[test] = result._replace(seconds=round_seconds(result.seconds))
    return merged


def round_seconds(seconds: float) -> float:
    """Return seconds as the file stores them."""
    return float(format_seconds(seconds)) if math.isfinite(seconds) and seconds > 0 else 0.0


def sort_by_age(results: Mapping[str, Result], commits: Iterable[str]) -> list[str]:
    """Return the tests with the oldest result first, after those without a result.

    Args:
        results: The results.
        commits: The commits of the history with eight digits each, oldest first.

    A commit that the history does not contain is older than every commit of it.
    """
    ages = {commit: age for age, commit in enumerate(commits, start=1)} | {NEVER: -1}
    return sorted(results, key=lambda test: (ages.get(results[test].commit, 0), test))
