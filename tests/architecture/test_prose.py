"""Comments of C++ sources and pages of the documentation use plain words.

The phrases below make technical English hard to read. A phrase is not always wrong, but ten code
bases of the field have 1 to 3 of them in 1,000 words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.workspace import ROOT

MAX_PHRASES = 4.0  # in 1,000 words
PHRASES = re.compile(
    r"\b(?:"
    + "|".join(
        (
            r"whoever|somebody|nobody|tells?|told|hears?|heard|beside|lies?|lay|so many",
            r"says?|said|asks?|asked|comes? of|came of|made of|goes on|go on|went on|learns",
            r"stands?|where (?:it|they) (?:is|are|lies?|lie)|of (?:its|their) own|gives?|takes?",
            r"wants?|leaves?|what (?:is|are|was|were|it|they|a|an|the|each|this)|meets?",
            r"as (?:it is|they are)|how (?:many|much|far|long) (?:it|they|of)",
            r"that there (?:is|are)|at once|by hand",
        )
    )
    + r")\b",
    re.IGNORECASE,
)
COMMENT = re.compile(r"(?<![:\"])//(.*)$")
SOURCES = {
    "comments of C++": ("packages/*/native/*.[hc]*", "packages/*/tests/native/*.[hc]*"),
    "documentation": ("docs/**/*.md", "packages/*/README.md", "*.md", ".github/*.md"),
}


def read_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbers and the text of lines: comments of C++, or Markdown without code and
    tables."""
    code = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if path.suffix != ".md":
            if comment := COMMENT.search(line):
                yield number, comment[1]
        elif line.lstrip().startswith("```"):
            code = not code
        elif not code and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_prose_uses_plain_words(kind: str) -> None:
    words, places = 0, []
    for path in sorted({path for pattern in SOURCES[kind] for path in ROOT.glob(pattern)}):
        for number, line in read_prose(path):
            words += len(line.split())
            name = path.relative_to(ROOT)
            places += [f"{name}:{number}: {phrase}" for phrase in PHRASES.findall(line)]
    assert words > 1000, "no sources"
    rate = 1000 * len(places) / words
    assert rate <= MAX_PHRASES, f"{rate:.1f} in 1,000 words:\n" + "\n".join(places)


def test_prose_of_a_comment_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "kernel.h"
    file.write_text("int x = 1;  // whoever asks\n// The kernel tells somebody.\n", "utf-8")
    found = [phrase for _, line in read_prose(file) for phrase in PHRASES.findall(line)]
    assert found == ["whoever", "asks", "tells", "somebody"]
