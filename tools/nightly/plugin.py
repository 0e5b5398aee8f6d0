"""A plugin of pytest: list the nightly tests, stop before a deadline, and log each result.

    python -m pytest -p tools.nightly.plugin --nightly-log=FILE -m nightly

adds a line to a log as soon as a test ends, so a killed run loses at most the test that it runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.nightly.results import REASON

#: Property of a report: id of a nightly test, and processor seconds of a phase.
SECONDS = "nightly_seconds"
DEFERRED = "deferred: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `tools.nightly`."""
    group = parser.getgroup("nightly")
    group.addoption("--nightly-list", help="write the collected tests to this file")
    group.addoption("--nightly-log", help="add a line for each nightly test to this file")
    group.addoption("--nightly-commit", default="-", help="eight digits of the tested commit")
    group.addoption("--nightly-plan", help="file with tests in order and their expected seconds")
    group.addoption("--nightly-deadline", type=float, help="time after which no test starts")


def pytest_configure(config: pytest.Config) -> None:
    """Register the parts that the options need, in the processes that need them."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("nightly_list"):
        config.pluginmanager.register(Listing(config), "nightly-listing")
    if config.getoption("nightly_log"):
        config.pluginmanager.register(Clock(config), "nightly-clock")
        if not is_worker:
            config.pluginmanager.register(Log(config), "nightly-log")


def get_id(item: pytest.Item) -> str:
    """Return the id of a test without the group that xdist appends to it."""
    mark = item.get_closest_marker("xdist_group")
    suffix = f"@{mark.args[0]}" if mark and mark.args else ""
    return item.nodeid.removesuffix(suffix)


def get_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test or a file was skipped, in one line."""
    longrepr: Any = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())[:REASON].strip() or "no reason"


class Listing:
    """Writes the collected tests with their groups, and the files that are skipped here."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(str(config.getoption("nightly_list")))
        self.skipped_files: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember a file that is skipped as a whole."""
        if report.skipped:
            self.skipped_files[report.nodeid] = get_reason(report)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the file."""
        tests = []
        for item in session.items:
            mark = item.get_closest_marker("xdist_group")
            group = mark.args[0] if mark and mark.args else item.nodeid.partition("::")[0]
            tests.append([item.nodeid, group])
        listing = {"tests": tests, "skipped_files": self.skipped_files}
        self.path.write_text(json.dumps(listing), encoding="utf-8")


class Clock:
    """Measures processor seconds, and skips the tests that would end after the deadline."""

    def __init__(self, config: pytest.Config) -> None:
        self.before = 0.0
        self.deadline: float | None = config.getoption("nightly_deadline")
        self.expected: dict[str, float] = {}
        plan = config.getoption("nightly_plan")
        for line in Path(plan).read_text(encoding="utf-8").splitlines() if plan else ():
            seconds, _, test = line.partition(" ")
            self.expected[test] = float(seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests as the plan does."""
        if self.expected:
            order = {test: place for place, test in enumerate(self.expected)}
            items.sort(key=lambda item: order.get(get_id(item), -1))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Start to measure."""
        self.before = get_processor_seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that would end after the deadline, before its fixtures are built."""
        if self.deadline is None:
            return
        left = self.deadline - time.time()
        expected = self.expected.get(get_id(item), 0.0)
        if expected > left:
            pytest.skip(f"{DEFERRED}needs {expected:.0f} s, and {max(left, 0):.0f} s are left")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Add the processor seconds to the report."""
        report: Any = yield
        now = get_processor_seconds()
        if item.get_closest_marker("nightly"):
            report.user_properties.append((SECONDS, (get_id(item), now - self.before)))
        self.before = now
        return report


def get_processor_seconds() -> float:
    """Return the seconds of this process and of the processes that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Log:
    """Adds a line to the log as soon as a test ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(str(config.getoption("nightly_log")))
        self.commit = str(config.getoption("nightly_commit"))
        self.running: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the phases of a test."""
        phases: list[Any] = [value for key, value in report.user_properties if key == SECONDS]
        is_crash = report.when not in ("setup", "call", "teardown")
        if not phases and not is_crash:
            return  # no nightly test
        test = phases[0][0] if phases else self.find_id(report.nodeid)
        entry = self.running.setdefault(
            test, {"id": test, "commit": self.commit, "seconds": 0.0, "outcome": "passed"}
        )
        entry["seconds"] += sum(seconds for _, seconds in phases)
        if report.failed:
            entry["outcome"] = "failed"
        elif hasattr(report, "wasxfail"):
            entry["outcome"] = "xfailed"
        elif report.skipped and entry["outcome"] != "failed":
            reason = get_reason(report)
            deferred = reason.startswith(DEFERRED)
            entry["outcome"] = "deferred" if deferred else f"skipped: {reason}"
        if is_crash or report.when == "teardown":
            self.write(self.running.pop(test))

    def find_id(self, crashed: str) -> str:
        """Return the id of a test that ended its process; xdist may append a group to it."""
        return crashed if crashed in self.running else crashed.rpartition("@")[0] or crashed

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line."""
        entry["seconds"] = round(entry["seconds"], 2)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
