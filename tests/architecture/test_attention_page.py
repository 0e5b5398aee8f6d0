"""docs/attention.md: its tables are those of the code."""

from __future__ import annotations

from tools import attention_table


def test_the_page_is_up_to_date() -> None:
    text = attention_table.PAGE.read_text(encoding="utf-8")
    assert text == attention_table.page(text), "run: uv run python -m tools.attention_table"
