"""The tests in the table of public advisories exist."""

from __future__ import annotations

import ast
import re

from tools.workspace import ROOT

PAGE = ROOT / "docs" / "advisories.md"
CVE = re.compile(r"CVE-\d{4}-\d{4,}")


def rows() -> list[list[str]]:
    """Yield the cells of every row of the tables without the headers."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "CVE-" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_of_a_table_references_an_existing_test() -> None:
    missing = []
    tables = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]
    every_row = [row for row in cells if row[-1] not in ("test", "---")]
    assert len(every_row) > len(rows())
    for advisory, *_, test in every_row:
        path, _, name = test.strip("`").partition("::")
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {node.name for node in ast.walk(tree) if isinstance(node, functions)}
        if name not in names:
            missing.append(f"{advisory}: {test}")
    assert not missing


def test_table_covers_the_compared_projects() -> None:
    advisories = [cve for row in rows() for cve in CVE.findall(row[0])]
    assert len(advisories) == len(set(advisories)) >= 30
    projects = {name.strip() for row in rows() for name in row[1].split(",")}
    assert projects >= {"vLLM", "SGLang", "TGI", "llama.cpp", "Ollama", "transformers"}
