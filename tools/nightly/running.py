"""Run the slice of a commit, and report its failed, skipped and deferred tests."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.nightly.results import LOG, NEVER, PATH, Result, merge_results, read_log, read_results
from tools.nightly.slices import COUNT, LAST_START, LIMIT, Plan, Test, compare_entries, make_plan
from tools.workspace import ROOT

#: Variables that change what a test does; the printed commands set those that are set.
VARIABLES = ("EASYDEL_TEST_PLATFORM", "UV_PYTHON", "XLA_FLAGS")
#: Status of a run that was ended at its limit.
TIMED_OUT = -1
#: Names of tests that one line lists.
LISTED = 20


@dataclass(frozen=True)
class Commit:
    """A commit and its place in the history."""

    hash: str
    number: int
    source: str
    """Where the number comes from, for the output."""


def read_commit(name: str = "HEAD", root: Path = ROOT) -> Commit:
    """Return a commit with the number of commits up to it.

    A shallow clone does not know that number; then the hash selects the slice. Without git, the
    slice is the first.

    Raises:
        ValueError: The name is unknown in this repository.
    """
    if not run_git(root, "rev-parse", "--git-dir"):
        return Commit(NEVER, 0, "no git repository: the first slice")
    full = run_git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not full:
        raise ValueError(f"{name!r} is no commit of this repository: see `git log`")
    if run_git(root, "rev-parse", "--is-shallow-repository") == "true":
        return Commit(full[:8], int(full[:8], 16), "the hash: this clone is shallow")
    number = int(run_git(root, "rev-list", "--count", full))
    return Commit(full[:8], number, f"commit number {number}")


def read_history(root: Path = ROOT) -> list[str]:
    """Return eight digits of each commit of the history, oldest first."""
    return [full[:8] for full in run_git(root, "rev-list", "--reverse", "HEAD").split()]


def run_git(root: Path, *arguments: str) -> str:
    """Return what git prints; nothing after an error, or without git."""
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def collect_tests(root: Path = ROOT) -> tuple[list[Test], dict[str, str]]:
    """Return all nightly tests, and the files that are skipped here with their reasons.

    Raises:
        RuntimeError: A file cannot be collected.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tests.json")
        command = [
            *(sys.executable, "-m", "pytest", "-p", "tools.nightly.plugin", "-m", "nightly"),
            *("-n", "0", "--collect-only", "-q", f"--nightly-list={path}"),
        ]
        process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if process.returncode not in (0, 5) or not path.is_file():
            output = process.stdout + process.stderr
            raise RuntimeError(f"the tests cannot be collected:\n{output}")
        listing = json.loads(path.read_text(encoding="utf-8"))
    return [Test(*test) for test in listing["tests"]], listing["skipped_files"]


def run_slice(
    name: str = "HEAD",
    root: Path = ROOT,
    log: Path = LOG,
    stored: Path | None = None,
    last_start: float = LAST_START,
    limit: float = LIMIT,
) -> int:
    """Collect the tests, run the slice of a commit, and print what happened.

    Args:
        name: Name of the commit that selects the slice.
        root: Folder of the tests.
        log: File that receives the results.
        stored: File of the last results.
        last_start: Seconds after which no test starts.
        limit: Seconds after which the tests are ended.

    Returns:
        The exit status: 1 if a test failed, or if pytest itself failed.
    """
    began = time.time()
    commit = read_commit(name, root)
    results = read_current(stored or PATH, log)
    tests, skipped_files = collect_tests(root)
    plan = make_plan(tests, results, commit.number)
    changes = describe_changes(tests, results, skipped_files)
    print("\n".join([*describe_plan(plan, commit), *changes]), flush=True)
    if not plan.ids:
        print("this slice has no tests")
        return 0
    log.parent.mkdir(parents=True, exist_ok=True)
    entries = log.read_text(encoding="utf-8").count("\n") if log.is_file() else 0
    outcomes: dict[str, Result] = {}
    status, remaining = 0, plan.ids
    while remaining:
        arguments = write_arguments(plan, remaining, log, commit.hash, began + last_start)
        status = run_pytest(arguments, root, began + limit - time.time())
        outcomes = read_log(log, entries)
        before, remaining = remaining, [test for test in plan.ids if test not in outcomes]
        # xdist ends a run when a test ends its process; the other tests run in a new one.
        if status == TIMED_OUT or len(remaining) == len(before):
            break
    with log.open("a", encoding="utf-8") as file:
        for test in remaining:  # tests that the limit ended, or did not reach
            entry = {"id": test, "commit": commit.hash, "seconds": 0.0, "outcome": "deferred"}
            file.write(json.dumps(entry) + "\n")
    print("\n".join(describe_outcomes(plan, outcomes, skipped_files, time.time() - began)))
    is_red = any(result.outcome == "failed" for result in outcomes.values())
    return 1 if is_red or (remaining and status != TIMED_OUT) else 0


def read_current(stored: Path, log: Path) -> dict[str, Result]:
    """Return the stored results with those of a log.

    A deferred test keeps its commit and its seconds; without an entry, the test remains new.
    """
    results, known = read_results(stored), read_log(log)
    results = merge_results(results, known)
    for test, result in known.items():
        if result.outcome == "deferred" and test in results:
            results[test] = results[test]._replace(outcome="deferred")
    return results


def write_arguments(
    plan: Plan, ids: Sequence[str], log: Path, commit: str, deadline: float
) -> list[str]:
    """Write the chosen tests beside the log, and return the arguments of pytest."""
    plan_file, ids_file = log.with_name("plan.txt"), log.with_name("ids.txt")
    lines = [f"{plan.seconds[test]:.1f} {test}\n" for test in ids]
    plan_file.write_text("".join(lines), encoding="utf-8")
    ids_file.write_text("".join(f"{test}\n" for test in ids), encoding="utf-8")
    return [
        *("-p", "tools.nightly.plugin", "-m", "nightly", f"@{ids_file}"),
        *(f"--nightly-plan={plan_file}", f"--nightly-log={log}"),
        *(f"--nightly-commit={commit}", f"--nightly-deadline={deadline}"),
    ]


def run_pytest(arguments: Sequence[str], root: Path, limit: float) -> int:
    """Run pytest for at most a number of seconds, and return its exit status, or `TIMED_OUT`."""
    command = [sys.executable, "-m", "pytest", *arguments]
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    try:
        return process.wait(max(limit, 1))
    except subprocess.TimeoutExpired:
        print(f"\nthe slice is ended after {limit:.0f} s", flush=True)
        return TIMED_OUT
    finally:
        end_processes(process)


def end_processes(process: subprocess.Popen[bytes]) -> None:
    """End pytest with its workers: first with an interrupt, so that it prints its summary."""
    for number, wait in ((signal.SIGINT, 20), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue


def describe_plan(plan: Plan, commit: Commit) -> list[str]:
    """Return the lines about the chosen tests."""
    lines = [
        f"slice {plan.number + 1} of {COUNT} of the nightly tests ({commit.source}): "
        f"{len(plan.ids)} tests of {len({i.partition('::')[0] for i in plan.ids})} files, "
        f"{sum(plan.seconds.values()):.0f} processor seconds"
    ]
    for title, ids in [
        ("new tests, which run in every slice until they have a result", plan.new),
        ("tests that failed or were deferred last time, so they run again", plan.again),
        ("deferred tests, because the slice is full", plan.deferred),
        ("tests longer than a slice, which only the nightly workflow runs", plan.too_long),
    ]:
        lines += list_tests(title, ids)
    return lines


def describe_changes(
    tests: Iterable[Test], results: Mapping[str, Result], skipped_files: Mapping[str, str]
) -> list[str]:
    """Return the lines about entries of tests that no longer exist."""
    _, vanished = compare_entries(tests, results, skipped_files)
    title = "entries without a test, which `python -m tools.nightly record --prune` removes"
    return list_tests(title, vanished)


def list_tests(title: str, ids: Sequence[str], limit: int = LISTED) -> list[str]:
    """Return a heading with the number of tests, and their names."""
    if not ids:
        return []
    lines = [f"{title} ({len(ids)}):", *(f"  {test}" for test in ids[:limit])]
    return [*lines, f"  and {len(ids) - limit} more"] if len(ids) > limit else lines


def describe_outcomes(
    plan: Plan, outcomes: Mapping[str, Result], skipped_files: Mapping[str, str], seconds: float
) -> list[str]:
    """Return the lines about the results of a run."""
    groups: dict[str, list[str]] = {}
    for test in plan.ids:
        outcome = outcomes[test].outcome if test in outcomes else "deferred"
        groups.setdefault(outcome, []).append(test)
    skips = {name: ids for name, ids in sorted(groups.items()) if name.startswith("skipped")}
    counts = {name: len(ids) for name, ids in groups.items() if name not in skips}
    if skips:
        counts["skipped"] = sum(map(len, skips.values()))
    lines = [""]
    for outcome, ids in skips.items():
        lines.append(f"{outcome} ({len(ids)}):")
        lines += [f"  {name}" for name in count_functions(ids)]
    for file, reason in sorted(skipped_files.items()):
        lines.append(f"no test of {file} was collected: {reason}")
    lines += list_tests("deferred tests, because the time is over", groups.get("deferred", []))
    for test in groups.get("failed", []):
        lines += [f"FAILED {test}", f"  repeat it: {get_repeat_command(test)}"]
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return [*lines, f"slice {plan.number + 1} of {COUNT}: {summary}, in {seconds:.0f} s"]


def count_functions(ids: Iterable[str]) -> list[str]:
    """Return the test functions, with the number of their cases if there are several."""
    counts: dict[str, int] = {}
    for test in ids:
        function = test.partition("[")[0]
        counts[function] = counts.get(function, 0) + 1
    return [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]


def get_repeat_command(test: str) -> str:
    """Return a shell command that runs one test as the slice ran it."""
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    command = ["uv", "run", "pytest", "-n", "0", "-m", "nightly", test]
    return shlex.join([*(["env", *variables] if variables else []), *command])
