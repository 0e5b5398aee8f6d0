"""Print the figures that tests record as the property `summary` at the end of the run."""

from __future__ import annotations

import pytest


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
