"""The tables of docs/attention.md equal those generated from the code."""

from __future__ import annotations

from ed_layers.attention import Kernel
from ed_layers.attention.kernels.vanilla import vanilla_attention
from ed_layers.attention.registry import built_in

from tools import attention_table


def test_attention_page_is_up_to_date() -> None:
    text = attention_table.PAGE.read_text(encoding="utf-8")
    assert text == attention_table.page(text), "run: uv run python -m tools.attention_table"


def test_added_kernel_is_listed_in_attention_table() -> None:
    lacks = frozenset({"bias", "chunk"})
    added = Kernel(
        "flash_attn2", "projected", "toy", vanilla_attention, "cpu", "native", lacks=lacks
    )
    tables = attention_table.tables((*built_in(), added))
    row = "| toy | `flash_attn2` | cpu | native | chunk, bias |\n"
    assert tables == attention_table.tables() + row
