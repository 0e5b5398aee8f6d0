"""A fixture for processes with torch; the figures that tests record as the property `summary`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def processes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a test import torch in transformers; see `tests/subprocesses`."""
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    visible = [folder for folder in folders if Path(folder).name != "subprocesses"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(visible))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded figures in the order in which the tests finished."""
    passed = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    figures = [
        str(value) for report in passed for key, value in report.user_properties if key == "summary"
    ]
    if figures:
        terminalreporter.section("figures")
        for figure in figures:
            terminalreporter.write_line(figure)
