"""The commands print results oldest first, and move results of runs into the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.nightly import __main__ as command
from tools.nightly.results import NEVER, Result, read_results, write_results
from tools.nightly.slices import Test
from tools.workspace import ROOT

STORED = {
    "a.py::test_new": Result("22222222", 3.0),
    "a.py::test_never": Result(NEVER, 0.0),
    "a.py::test_old": Result("11111111", 12.0, "failed"),
    "a.py::test_gone": Result("11111111", 1.0),
}
TESTS = [Test(f"a.py::test_{name}", "a.py") for name in ("new", "never", "old", "added")]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Use a results file, a log, a history and tests of this test only."""
    path, log = tmp_path / "results.tsv", tmp_path / "log.jsonl"
    monkeypatch.setattr(command, "PATH", path)
    monkeypatch.setattr(command, "LOG", log)
    monkeypatch.setattr(command, "read_history", lambda: ["11111111", "22222222", "33333333"])
    monkeypatch.setattr(command, "collect_tests", lambda: (TESTS, {}))
    write_results(STORED, path)
    return path, log


def write_log(log: Path, **outcomes: str) -> None:
    entries = [
        {"id": f"a.py::test_{name}", "commit": "33333333", "seconds": 2.0, "outcome": outcome}
        for name, outcome in outcomes.items()
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_list_prints_oldest_results_first_with_unrecorded_ones(files, capsys) -> None:
    write_log(files[1], gone="passed")
    assert command.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1].removeprefix("a.py::test_") for line in lines] == [
        "never",
        "old",
        "new",
        "gone",
    ]
    assert lines[1][:4] == ["11111111", "12", "s", "failed"]
    assert command.main(["list", "--outcome", "failed"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("a.py::test_old")


def test_record_moves_results_of_runs_into_the_file(files, capsys) -> None:
    path, log = files
    write_log(log, never="passed", old="deferred", new="failed")
    assert command.main(["record"]) == 0
    assert read_results(path) == STORED | {
        "a.py::test_never": Result("33333333", 2.0),
        "a.py::test_new": Result("33333333", 2.0, "failed"),
    }
    assert not log.exists()
    assert "4 tests, 2 changed" in capsys.readouterr().out
    before = path.read_text()
    assert command.main(["record"]) == 0
    assert path.read_text() == before


def test_pruned_record_loses_vanished_tests_and_new_tests_remain_new(files, capsys) -> None:
    path, _ = files
    assert command.main(["record", "--prune"]) == 0
    assert read_results(path).keys() == STORED.keys() - {"a.py::test_gone"}
    capsys.readouterr()
    assert command.main(["check"]) == 0
    assert "tests without an entry (1):\n  a.py::test_added" in capsys.readouterr().out


def test_record_of_another_log_keeps_that_log(files, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.jsonl"
    write_log(other, never="passed")
    assert command.main(["record", str(other)]) == 0
    assert other.exists()
    assert read_results(files[0])["a.py::test_never"].commit == "33333333"
    assert command.main(["record", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl does not exist" in capsys.readouterr().err


def test_check_names_new_and_vanished_tests(capsys) -> None:
    assert command.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "tests without an entry (1):\n  a.py::test_added" in printed
    assert "entries without a test (1):\n  a.py::test_gone" in printed


def test_slice_prints_the_tests_and_rejects_an_unknown_commit(capsys) -> None:
    assert command.main(["slice"]) == 0
    printed = capsys.readouterr().out
    assert "a.py::test_added" in printed.splitlines()
    assert "tests that failed or were deferred last time" in printed
    assert command.main(["slice", "--commit", "no-such-commit"]) == 2
    assert "'no-such-commit' is no commit" in capsys.readouterr().err


def test_check_of_each_commit_runs_a_slice_and_knows_the_number_of_commits() -> None:
    steps = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert "  uv run python -m tools.nightly run" in steps
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert "fetch-depth: 0" in workflow
