"""Every headline of README.md and docs/ has a claim with a test of the default run.

claims.toml lists them: a table for each headline, and in it a claim and the test that shows it. The
table `"*"` of a page covers all its headlines: generated pages, and pages about one thing.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("claims.toml")
WHOLE = "*"
NIGHTLY = "pytest.mark.nightly"
#: Page -> headline -> claim -> test.
Claims = dict[str, dict[str, dict[str, str]]]


def read_claims() -> Claims:
    return tomllib.loads(TABLE.read_text())


def find_headlines(text: str) -> list[str]:
    """Return the headlines of the first two levels, outside of code blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^##? (.+)$", outside, flags=re.MULTILINE)


def read_pages() -> dict[str, str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}


@functools.cache
def find_tests(path: Path) -> dict[str, bool]:
    """Return the tests of a file, and whether all cases of each are nightly."""
    tree = ast.parse(path.read_text())
    of_file = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and NIGHTLY in ast.unparse(node.value)
        for node in tree.body
    )
    return {
        node.name: of_file or NIGHTLY in map(ast.unparse, node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def find_faults(claims: Claims, pages: dict[str, str]) -> Iterator[str]:
    """Yield a message for each headline without a claim, and for each claim without a test."""
    for page, text in pages.items():
        headlines = claims.get(page, {})
        for headline in find_headlines(text):
            if not headlines.get(headline) and not headlines.get(WHOLE):
                yield f"{page}: the headline {headline!r} has no claim; add its test to claims.toml"
    for page, headlines in claims.items():
        for headline, tests in headlines.items():
            if page not in pages or headline not in (WHOLE, *find_headlines(pages[page])):
                yield f"claims.toml: {page} has no headline {headline!r}; remove or rename it"
            for claim, test in tests.items():
                if reason := describe_missing_test(test):
                    yield f"{page}, {headline}: {claim!r} has no test: {test} {reason}"


def describe_missing_test(test: str) -> str:
    """Return why the default run does not have a test; empty if it does."""
    file, _, name = test.partition("::")
    if not (ROOT / file).is_file():
        return "names no file"
    nightly = find_tests(ROOT / file).get(name)
    if nightly is None:
        return "does not exist"
    return "is nightly" if nightly else ""


def test_every_headline_has_a_claim_with_a_test_of_the_default_run() -> None:
    assert not [*find_faults(read_claims(), read_pages())]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"Measured": {}}, "'Measured' has no claim"),
        ({"Gone": {"x": "tests/claims/test_small_cases.py::test_x"}}, "no headline 'Gone'"),
        ({"Measured": {"x": "tests/claims/test_gone.py::test_x"}}, "names no file"),
        ({"Measured": {"x": "tests/claims/test_small_cases.py::test_x"}}, "does not exist"),
        (
            {"Measured": {"x": "tests/rollout/test_asynchronous.py::"
             "test_run_without_staleness_equals_run_in_one_process"}},
            "is nightly",
        ),
    ],
)  # fmt: skip
def test_claim_without_a_test_is_found(change, fault) -> None:
    claims = read_claims()
    faults = [*find_faults({**claims, "README.md": claims["README.md"] | change}, read_pages())]
    assert faults and any(fault in text for text in faults)


def test_headlines_in_code_blocks_are_no_claims() -> None:
    assert find_headlines("# A\n```bash\n# no\n```\n## `b`\n### c\n") == ["A", "`b`"]
