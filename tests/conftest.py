"""Figures that a test records as the property `summary` are printed at the end of the run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the recorded figures, in the order in which the tests ended."""
    passed = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    figures = [
        str(value) for report in passed for key, value in report.user_properties if key == "summary"
    ]
    if figures:
        terminalreporter.section("figures")
        for figure in figures:
            terminalreporter.write_line(figure)
