"""Word and character error rates of transcripts (WER, CER): edits per word and per character.

Edits are the insertions, deletions and substitutions of the shortest edit script. The rates of
several transcripts are the sum of their edits divided by the sum of the lengths, as in jiwer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


def edit_distance(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> int:
    """Return the number of edits from one sequence to the other (Levenshtein 1966)."""
    numbers: dict[Hashable, int] = {}
    first, second = (
        np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64)
        for items in (reference, hypothesis)
    )
    places = np.arange(len(second) + 1)
    row = places
    for count, item in enumerate(first, 1):
        changed = np.minimum(row[:-1] + (second != item), row[1:] + 1)
        # An insertion continues the best smaller entry of the same row.
        row = np.minimum.accumulate(np.concatenate([[count], changed]) - places) + places
    return int(row[-1])


@dataclass
class ErrorRates:
    """Counts the errors of transcripts.

    Attributes:
        word_edits, words: edits of words, and words of the references.
        character_edits, characters: the same for characters.
    """

    word_edits: int = 0
    words: int = 0
    character_edits: int = 0
    characters: int = 0

    def add(self, reference: str, hypothesis: str) -> None:
        """Count the errors of one transcript; white space at both ends is ignored."""
        reference, hypothesis = reference.strip(), hypothesis.strip()
        words = reference.split()
        self.word_edits += edit_distance(words, hypothesis.split())
        self.words += len(words)
        self.character_edits += edit_distance(reference, hypothesis)
        self.characters += len(reference)

    def rates(self) -> dict[str, float]:
        """Return `wer` and `cer`; empty if no reference has a word."""
        if not self.words:
            return {}
        return {
            "wer": self.word_edits / self.words,
            "cer": self.character_edits / self.characters,
        }
