"""docs/models.md: its table is that of the registry and of the kept results."""

from __future__ import annotations

import pytest

from tests.conformance.cases import subjects
from tools import conformance_results, model_table


def test_the_page_is_up_to_date() -> None:
    text = model_table.PAGE.read_text(encoding="utf-8")
    assert text == model_table.page(text), "run: uv run python -m tools.model_table"


def test_results_are_of_rows_that_are_there() -> None:
    there = {(row.model_type, row.row) for row in subjects()}
    results = conformance_results.read()
    gone = {(family, row) for family, of in results.items() for row in of} - there
    assert not gone, "run: uv run python -m tools.conformance_results --missing"
    failed = [
        f"{family}: {row}: {check}: {value}"
        for family, of in results.items()
        for row, checks in of.items()
        for check, value in checks.items()
        if isinstance(value, str)
    ]
    assert not failed


@pytest.mark.nightly
def test_every_row_of_every_family_has_its_results() -> None:
    """They take minutes a family, so a new one may come without; the release may not."""
    results = conformance_results.read()
    rows = subjects()
    incomplete = [str(row) for row in rows if not conformance_results.is_complete(results, row)]
    assert not incomplete, "run: uv run python -m tools.conformance_results --missing"


def test_model_table_summarizes_results() -> None:
    results: conformance_results.Results = {
        "llama": {"a": {"parity": 2.3e-6, "cache": 0.0}, "b": {"parity": 4e-6, "saved": "torn"}}
    }
    assert model_table.largest(results, "llama", "parity") == "4e-6"
    assert model_table.largest(results, "llama", "cache") == "0"
    assert model_table.largest(results, "llama", "saved") == "fails"
    assert model_table.largest(results, "llama", "pages") == ""
    assert model_table.special("llama").startswith("Llama (Touvron et al. 2023")
