"""A run of a slice logs each result, defers what does not fit, and names what failed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.nightly import running
from tools.nightly.results import NEVER, Result, format_results, read_log
from tools.nightly.running import (
    collect_tests,
    get_repeat_command,
    read_commit,
    read_current,
    run_slice,
)
from tools.nightly.slices import Plan
from tools.workspace import ROOT

SETTINGS = """
[pytest]
addopts = -p xdist.plugin -p xdist.looponfail -p no:cacheprovider --strict-markers
    --numprocesses=1 --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0
    --import-mode=importlib
markers =
    nightly: long
"""
FILES = {
    "pytest.ini": SETTINGS,
    "test_first.py": """
import os, subprocess, sys, time, pytest
pytestmark = pytest.mark.nightly

@pytest.mark.parametrize("case", ["a: b", "it's [x] $HOME @"])
def test_passes(case):
    pass

def test_fails():
    assert "value" == 1

def test_dies():
    os._exit(3)

def test_skipped():
    pytest.importorskip("absent_server")

@pytest.mark.xfail(strict=True)
def test_known():
    assert False

def test_works():
    deadline = time.process_time() + 0.3
    while time.process_time() < deadline:
        pass
    subprocess.run([sys.executable, "-c", "for _ in range(10**7): pass"], check=True)
""",
    "test_second.py": """
import pytest
pytestmark = pytest.mark.xdist_group("a group")
@pytest.mark.nightly
@pytest.mark.parametrize("case", ["x@y"])
def test_late(case): pass
@pytest.mark.nightly
def test_long(): pass
def test_daily(): raise ValueError
""",
    "test_third.py": "import pytest\npytest.importorskip('absent_module')\n",
}
COMMIT = "0064010b"
NO_SERVER = "could not import 'absent_server': No module named 'absent_server'"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take seconds
    for name in (*running.VARIABLES, "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def one_slice(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """Put all tests of the project into the slice."""

    def plan_all(tests, results, number, capacity=1e9) -> Plan:
        ids = [test.id for test in tests]
        return Plan(0, ids, {i: 1000.0 if "test_long" in i else 0.1 for i in ids})

    monkeypatch.setattr(running, "make_plan", plan_all)


def test_collection_lists_nightly_tests_and_skipped_files(project: Path) -> None:
    tests, skipped_files = collect_tests(project)
    assert len(tests) == 9
    assert "test_first.py::test_passes[a: b]" in {test.id for test in tests}
    assert {test.group for test in tests} == {"test_first.py", "a group"}
    assert list(skipped_files) == ["test_third.py"]
    assert "absent_module" in skipped_files["test_third.py"]


def test_file_that_cannot_be_imported_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_bad.py").write_text("import module_that_is_absent")
    with pytest.raises(RuntimeError, match="module_that_is_absent"):
        collect_tests(tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("one_slice")
def test_slice_reports_and_logs_each_outcome(project: Path, tmp_path: Path, capfd) -> None:
    stored, log = tmp_path / "results.tsv", tmp_path / "log.jsonl"
    gone = {"test_first.py::test_gone": Result(COMMIT, 1.0)}
    stored.write_text(format_results(gone | {"test_third.py::test_x": Result(COMMIT, 1.0)}))
    assert run_slice(root=project, log=log, stored=stored) == 1
    results = read_log(log)
    assert {test.partition("::")[2]: result.outcome for test, result in results.items()} == {
        "test_passes[a: b]": "passed",
        "test_passes[it's [x] $HOME @]": "passed",
        "test_fails": "failed",
        "test_dies": "failed",
        "test_skipped": f"skipped: {NO_SERVER}",
        "test_known": "xfailed",
        "test_works": "passed",
        "test_late[x@y]": "passed",
        "test_long": "deferred",
    }
    # Its own work and that of its child, whatever else the machine does.
    assert results["test_first.py::test_works"].seconds > 0.35
    printed = capfd.readouterr().out
    for line in [
        "FAILED test_first.py::test_fails",
        "  repeat it: uv run pytest -n 0 -m nightly test_first.py::test_dies",
        f"skipped: {NO_SERVER} (1):",
        "  test_first.py::test_skipped",
        "no test of test_third.py was collected: could not import 'absent_module': "
        "No module named 'absent_module'",
        "  test_first.py::test_gone",
    ]:
        assert line in printed.splitlines()
    assert "1 deferred, 2 failed, 4 passed, 1 skipped, 1 xfailed" in printed
    assert "test_third.py::test_x" not in printed


@pytest.mark.nightly
@pytest.mark.usefixtures("one_slice")
def test_slice_ends_at_its_limit_and_keeps_the_finished_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_slow.py").write_text(
        "import pathlib, time, pytest\npytestmark = pytest.mark.nightly\n"
        "def test_quick(): pass\n"
        "def test_endless(): time.sleep(3600)\n"
        "def test_after(): pass\n"
    )
    log = tmp_path / "log.jsonl"

    class Process(subprocess.Popen):
        """A process whose first wait ends when the log has a result."""

        def wait(self, timeout: float | None = None) -> int:
            is_slice = {"pytest", f"--nightly-log={log}"} <= {*self.args}
            while is_slice and not read_log(log):
                time.sleep(0.05)
                assert self.poll() is None
            if is_slice and not hasattr(self, "is_over"):
                self.is_over = True
                raise subprocess.TimeoutExpired("pytest", 0.0)
            return super().wait(timeout)

    monkeypatch.setattr(running.subprocess, "Popen", Process)
    assert run_slice(root=tmp_path, log=log, stored=tmp_path / "none.tsv") == 0
    assert {test.partition("::")[2]: result.outcome for test, result in read_log(log).items()} == {
        "test_quick": "passed",
        "test_endless": "deferred",  # so it comes first in the next slice, until its own time limit
        "test_after": "deferred",
    }
    printed = capfd.readouterr().out
    assert "deferred tests, because the time is over (2):" in printed
    assert "2 deferred, 1 passed" in printed


def test_printed_command_repeats_the_failed_test(project: Path) -> None:
    command = get_repeat_command("test_first.py::test_passes[it's [x] $HOME @]")
    assert command.startswith("uv run pytest ")
    done = subprocess.run(
        ["bash", "-c", command.replace("uv run pytest", f"{sys.executable} -m pytest -q", 1)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout


def test_printed_command_contains_the_variables_of_the_run(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --b=2")
    assert get_repeat_command("a.py::b").startswith("env 'XLA_FLAGS=--a=1 --b=2' uv run")


def test_number_of_a_commit_counts_its_history_and_a_shallow_clone_uses_the_hash(
    tmp_path: Path,
) -> None:
    def git(*arguments: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *settings, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert read_commit(root=tmp_path).number == 0
    git("init", "-q", "whole")
    for _ in range(3):
        git("-C", "whole", "commit", "-q", "--allow-empty", "-m", "x")
    whole = read_commit(root=tmp_path / "whole")
    assert whole.number == 3
    assert read_commit("HEAD~1", tmp_path / "whole").number == 2
    git("clone", "-q", "--depth=1", f"file://{tmp_path}/whole", "shallow")
    shallow = read_commit(root=tmp_path / "shallow")
    assert shallow.hash == whole.hash
    assert shallow.number == int(whole.hash, 16)
    with pytest.raises(ValueError, match="'absent' is no commit"):
        read_commit("absent", tmp_path / "whole")


def test_log_contains_only_nightly_tests(project: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.nightly.plugin", "-n", "0"]
    command += [f"--nightly-log={log}", f"--nightly-commit={COMMIT}", "test_second.py"]
    subprocess.run(command, cwd=project, capture_output=True, check=False)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert {entry["id"] for entry in entries} == {
        "test_second.py::test_late[x@y]",
        "test_second.py::test_long",
    }
    assert {entry["commit"] for entry in entries} == {COMMIT}


def test_deferred_test_keeps_its_seconds_and_a_new_one_remains_new(tmp_path: Path) -> None:
    stored, log = tmp_path / "results.tsv", tmp_path / "log.jsonl"
    never = Result(NEVER, 0.0)
    stored.write_text(format_results({"a::known": Result(COMMIT, 9.0), "a::never": never}))
    entry = {"commit": "11111111", "seconds": 0.0, "outcome": "deferred"}
    names = ("a::known", "a::never", "a::new")
    log.write_text("".join(json.dumps({"id": name, **entry}) + "\n" for name in names))
    assert read_current(stored, log) == {
        "a::known": Result(COMMIT, 9.0, "deferred"),
        "a::never": never._replace(outcome="deferred"),
    }
