"""Write the table of ratios of README.md from the tables of docs/benchmarks.md.

uv run python -m tools.overview_table            write the page
uv run python -m tools.overview_table --check    exit 1 if the page is outdated
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE, SOURCE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tools/overview_table.py -->\n", "<!-- end of ratios -->\n"

Table = list[dict[str, str]]


@dataclass(frozen=True)
class Cell:
    """A number of a table of the page of benchmarks.

    Attributes:
        header: The cells of the first line of the table, with ` | ` between them.
        line: The first cell, or the first cells with ` | ` between them, of the line.
        column: Name of the column.
        last: Whether the last number of the cell is meant, instead of the first.
    """

    header: str
    line: str
    column: str
    last: bool = False


@dataclass(frozen=True)
class Ratio:
    """A line of the table: one or several ratios of one comparison.

    Attributes:
        work: What both programs do.
        other: The other program.
        section: Headline of the page of benchmarks.
        ratios: Pairs of numerator and denominator; without a denominator the cell is a ratio.
    """

    work: str
    other: str
    section: str
    ratios: tuple[tuple[Cell, Cell | None], ...]


_TRAIN = "15M parameters, 8 x 256 tokens | s a step | tokens/s | peak, GiB | torch / this"
_DPO = "15M parameters, 8 pairs of 2 x 256 tokens | s a step | tokens/s | peak, GiB | torch / this"
_DECODE = (
    "our speed / theirs (A, B) | batch 1 | batch 8 | batch 32 | prompt of 512 | prompt of 2048"
)
_SERVE = "| clients | tokens/s | first token, ms (95 %) | between tokens, ms (95 %)"
_BATCHES = ("batch 1", "batch 8", "batch 32")


def compare_serving(ours: str, other: str) -> tuple[tuple[Cell, Cell | None], ...]:
    """Return the ratios of tokens/s with 1, 8 and 32 clients."""
    return tuple(
        (
            Cell(_SERVE, f"{ours} | {clients}", "tokens/s"),
            Cell(_SERVE, f"{other} | {clients}", "tokens/s"),
        )
        for clients in (1, 8, 32)
    )


RATIOS = (
    Ratio(
        "a training step, float32 and bfloat16",
        "transformers on torch",
        "A training step against torch",
        (
            (Cell(_TRAIN, "ours", "tokens/s"), Cell(_TRAIN, "torch", "tokens/s")),
            (
                Cell(_TRAIN, "ours, bfloat16", "tokens/s"),
                Cell(_TRAIN, "torch, bfloat16 by autocast", "tokens/s"),
            ),
        ),
    ),
    Ratio(
        "a step of DPO",
        "TRL",
        "A training step against torch",
        ((Cell(_DPO, "ours", "tokens/s"), Cell(_DPO, "TRL", "tokens/s")),),
    ),
    Ratio(
        "decoding in 4 bits, 1, 8 and 32 sequences",
        "llama.cpp q4_0",
        "Decode and prefill against other programs",
        tuple((Cell(_DECODE, "int4 / llama.cpp q4_0", name, True), None) for name in _BATCHES),
    ),
    Ratio(
        "decoding in 8 bits, 1, 8 and 32 sequences",
        "llama.cpp q8_0",
        "Decode and prefill against other programs",
        tuple((Cell(_DECODE, "int8 / llama.cpp q8_0", name, True), None) for name in _BATCHES),
    ),
    Ratio(
        "serving in bfloat16, 1, 8 and 32 clients",
        "vLLM, CPU build",
        "Serving",
        compare_serving("ours", "vLLM"),
    ),
    Ratio(
        "serving in float32, 1, 8 and 32 clients",
        "llama.cpp",
        "Serving",
        compare_serving("ours", "llama.cpp"),
    ),
)


def read_tables(text: str) -> list[tuple[str, Table]]:
    """Return the header and the lines of each table of a Markdown text."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[c.strip() for c in line[1:-1].split("|")] for line in block.splitlines()]
        header = " | ".join(lines[0]).strip()
        tables.append((header, [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]))
    return tables


def read_cell(tables: list[tuple[str, Table]], cell: Cell, other: str) -> float:
    """Return the number of a cell.

    Args:
        tables: The tables of a section.
        cell: The cell.
        other: Text that the lines of the table contain; several tables may have one header.

    Raises:
        ValueError: not exactly one table has the cell.
    """
    numbers = set()
    for header, lines in tables:
        if header != cell.header or not any(other in "".join(line.values()) for line in lines):
            continue
        count = cell.line.count(" | ") + 1
        for line in lines:
            if " | ".join([*line.values()][:count]) == cell.line:
                found = re.findall(r"\d[\d,]*\.?\d*", line[cell.column])
                numbers.add(float(found[-1 if cell.last else 0].rstrip(",").replace(",", "")))
    if len(numbers) != 1:
        raise ValueError(f"{cell} has {len(numbers)} numbers in {SOURCE.name}")
    return numbers.pop()


def build_table(text: str) -> str:
    """Return the table of README.md from the text of the page of benchmarks."""
    lines = ["", *heading("work on two CPU cores", "compared with", "our speed / theirs")]
    for ratio in RATIOS:
        section = text.split(f"## {ratio.section}\n")[1].split("\n## ")[0]
        tables = read_tables(section)
        name = ratio.ratios[0][1].line.split(" | ")[0] if ratio.ratios[0][1] else ""
        values = []
        for ours, theirs in ratio.ratios:
            value = read_cell(tables, ours, name)
            values.append(value / read_cell(tables, theirs, name) if theirs else value)
        anchor = re.sub(r"[^a-z0-9]+", "-", ratio.section.lower())
        shown = ", ".join(f"{value:.2f}" for value in values)
        lines.append(row(f"[{ratio.work}](docs/benchmarks.md#{anchor})", ratio.other, shown))
    return "\n".join(lines) + "\n\n"


def page() -> str:
    """Return README.md with a new table."""
    table = build_table(SOURCE.read_text(encoding="utf-8"))
    return pages.with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, table)


if __name__ == "__main__":
    sys.exit(pages.main("overview_table", PAGE, page))
