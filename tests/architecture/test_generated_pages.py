"""The generated tables of docs/attention.md and docs/models.md are up to date."""

from __future__ import annotations

import pytest
from ed_layers.attention import Kernel
from ed_layers.attention.kernels import built_in
from ed_layers.attention.kernels.vanilla import vanilla_attention

from tests.conformance import results as conformance_results
from tests.conformance.cases import subjects
from tools import (
    attention_table,
    bits_table,
    flag_table,
    gguf_table,
    model_table,
    overview_table,
    quickstart_table,
)
from tools.bench import quality


def test_attention_page_is_up_to_date() -> None:
    text = attention_table.PAGE.read_text(encoding="utf-8")
    assert text == attention_table.page(text), "run: uv run python -m tools.attention_table"


def test_table_of_equal_bits_matches_the_results() -> None:
    text = bits_table.PAGE.read_text(encoding="utf-8")
    assert text == bits_table.page(text), "run: uv run python -m tools.bits_table"


def test_gguf_table_matches_the_architectures() -> None:
    text = gguf_table.PAGE.read_text(encoding="utf-8")
    assert text == gguf_table.page(text), "run: uv run python -m tools.gguf_table"


def test_ratios_of_the_readme_are_those_of_the_benchmarks() -> None:
    text = overview_table.PAGE.read_text(encoding="utf-8")
    assert text == overview_table.page(), "run: uv run python -m tools.overview_table"
    page = overview_table.SOURCE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="has 0 numbers"):
        overview_table.build_table(page.replace("| ours, bfloat16 |", "| other |"))


def test_scores_and_answers_of_the_quickstart_are_those_of_its_run() -> None:
    for path in quickstart_table.PAGES:
        text = path.read_text(encoding="utf-8")
        assert text == quickstart_table.page(text), "run: uv run python -m tools.quickstart_table"


def test_quality_tables_are_those_of_the_stored_figures() -> None:
    text = quality.PAGE.read_text(encoding="utf-8")
    assert text == quality.build_page(text), "run: uv run python -m tools.bench.quality page"


def test_added_kernel_is_listed_in_attention_table() -> None:
    lacks = frozenset({"bias", "chunk"})
    added = Kernel(
        "flash_attn2", "projected", "toy", vanilla_attention, "cpu", "native", lacks=lacks
    )
    tables = attention_table.tables((*built_in(), added))
    row = "| toy | `flash_attn2` | cpu | native | chunk, bias |\n"
    assert tables == attention_table.tables() + row


def test_model_page_is_up_to_date() -> None:
    text = model_table.PAGE.read_text(encoding="utf-8")
    assert text == model_table.page(text), "run: uv run python -m tools.model_table"


def test_stored_conformance_results_belong_to_existing_cases() -> None:
    there = {(row.model_type, row.row) for row in subjects()}
    results = conformance_results.read()
    gone = {(family, row) for family, of in results.items() for row in of} - there
    assert not gone, "run: uv run python -m tests.conformance.results --missing"
    failed = [
        f"{family}: {row}: {check}: {value}"
        for family, of in results.items()
        for row, checks in of.items()
        for check, value in checks.items()
        if isinstance(value, str)
    ]
    assert not failed


@pytest.mark.nightly
def test_every_conformance_case_has_complete_results() -> None:
    """The checks of a family need minutes, so a change may add a family without results."""
    results = conformance_results.read()
    rows = subjects()
    incomplete = [str(row) for row in rows if not conformance_results.is_complete(results, row)]
    assert not incomplete, "run: uv run python -m tests.conformance.results --missing"


def test_model_table_summarizes_results() -> None:
    results: conformance_results.Results = {
        "llama": {"a": {"parity": 2.3e-6, "cache": 0.0}, "b": {"parity": 4e-6, "saved": "torn"}}
    }
    assert model_table.largest(results, "llama", "parity") == "4e-6"
    assert model_table.largest(results, "llama", "cache") == "0"
    assert model_table.largest(results, "llama", "saved") == "fails"
    assert model_table.largest(results, "llama", "pages") == ""
    assert model_table.special("llama").startswith("Llama (Touvron et al. 2023")


def test_tables_of_flags_are_up_to_date() -> None:
    for path in flag_table.PAGES:
        written = path.read_text(encoding="utf-8")
        assert written == flag_table.page(path), "run: uv run python -m tools.flag_table"
