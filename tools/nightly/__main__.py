"""The nightly tests in slices, and the last result of each.

    uv run python -m tools.nightly list                 the last results, oldest first
    uv run python -m tools.nightly slice --commit HEAD  the tests that a commit runs
    uv run python -m tools.nightly run                  run the slice of this commit, as CI
    uv run python -m tools.nightly record               add the results of runs here to the file
    uv run python -m tools.nightly record --prune       also remove entries of vanished tests
    uv run python -m tools.nightly check                name tests without entry, and the opposite

The file is tests/nightly/results.tsv. `run` adds its results to .cache/nightly/log.jsonl, which git
ignores; `record` adds them to the file, for a commit. Any run of pytest writes such a log with
`-p tools.nightly.plugin --nightly-log=FILE --nightly-commit=COMMIT`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.nightly.results import (
    LOG,
    NEVER,
    PATH,
    format_seconds,
    merge_results,
    read_log,
    read_results,
    sort_by_age,
    write_results,
)
from tools.nightly.running import (
    collect_tests,
    describe_plan,
    list_tests,
    read_commit,
    read_history,
    run_slice,
)
from tools.nightly.slices import compare_entries, make_plan


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.nightly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the last results, oldest first")
    listing.add_argument("--outcome", help="only results whose outcome starts with this text")
    for name, text in [("slice", "print the tests of a commit"), ("run", "run them")]:
        commands.add_parser(name, help=text).add_argument("--commit", default="HEAD")
    recording = commands.add_parser("record", help="add results to the file")
    recording.add_argument("logs", nargs="*", type=Path, help=f"default: {LOG.name}")
    recording.add_argument("--prune", action="store_true", help="remove entries of vanished tests")
    commands.add_parser("check", help="name new and vanished tests; status 1 if a test vanished")
    given = parser.parse_args(arguments)
    try:
        if given.command == "list":
            return print_results(given.outcome or "")
        if given.command == "slice":
            return print_slice(given.commit)
        if given.command == "run":
            return run_slice(given.commit)
        if given.command == "record":
            return record_results(given.logs or [LOG], given.prune)
        return check_entries()
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `list | head`
        sys.stderr.close()
        return 0


def print_results(outcome: str) -> int:
    """Print the last results, oldest first."""
    results = merge_results(read_results(PATH), read_log(LOG))
    for test in sort_by_age(results, read_history()):
        result = results[test]
        if result.outcome.startswith(outcome):
            seconds = "" if result.commit == NEVER else f"{format_seconds(result.seconds)} s"
            text = "never run" if result.commit == NEVER else result.outcome
            print(f"{result.commit:8} {seconds:>7}  {text}  {test}", flush=True)
    return 0


def print_slice(name: str) -> int:
    """Print the tests that a commit runs."""
    commit = read_commit(name)
    tests, _ = collect_tests()
    plan = make_plan(tests, read_results(PATH), commit.number)
    print("\n".join([*describe_plan(plan, commit), *plan.ids]))
    return 0


def record_results(logs: list[Path], prune: bool) -> int:
    """Add the results of logs to the file, and delete the default log."""
    old = results = read_results(PATH)
    for log in logs:
        if not log.is_file() and log != LOG:
            raise ValueError(f"{log} does not exist: name a log of `tools.nightly.plugin`")
        results = merge_results(results, read_log(log))
    if prune:
        tests, skipped_files = collect_tests()
        _, vanished = compare_entries(tests, results, skipped_files)
        results = {test: result for test, result in results.items() if test not in set(vanished)}
    write_results(results, PATH)
    if LOG in logs:
        LOG.unlink(missing_ok=True)
    changed = sum(results.get(test) != old.get(test) for test in results.keys() | old.keys())
    print(f"{PATH.name}: {len(results)} tests, {changed} changed")
    return 0


def check_entries() -> int:
    """Print the tests without an entry, and the entries without a test."""
    tests, skipped_files = collect_tests()
    new, vanished = compare_entries(tests, read_results(PATH), skipped_files)
    lines = list_tests("tests without an entry", new, len(new))
    lines += list_tests("entries without a test", vanished, len(vanished))
    print("\n".join(lines) or "each nightly test has an entry")
    return 1 if vanished else 0


if __name__ == "__main__":
    sys.exit(main())
