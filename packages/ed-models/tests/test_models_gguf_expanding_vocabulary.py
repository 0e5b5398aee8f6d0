"""Vocabularies of GGUF files whose tokenizers would need far more memory than the file."""

from __future__ import annotations

import random
import string
import tracemalloc

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.gguf.vocabulary import KEY, TokenTable, merges_of_scores


def table(tokens: list[str], kind: int = 1) -> TokenTable:
    count = len(tokens)
    return TokenTable(
        {
            f"{KEY}.tokens": tokens,
            f"{KEY}.token_type": np.full(count, kind, np.int32),
            f"{KEY}.scores": -np.arange(count, dtype=np.float32),
        }
    )


def substrings(length: int) -> list[str]:
    """Return all parts of a random text: each cut of each token gives two tokens."""
    text = "".join(random.Random(0).choices(string.ascii_letters, k=length))
    return sorted({text[a:b] for a in range(length) for b in range(a + 1, length + 1)})


def test_tokens_with_many_cuts_are_an_error_before_merges_are_stored() -> None:
    made = table(substrings(120))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"have more than .* merges"):
        merges_of_scores(made)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The tokens themselves have about this size; the merges would have 60 MB.
    assert peak < 4 * 2**20


def test_small_vocabulary_has_all_merges_in_the_order_of_scores() -> None:
    made = table(["a", "b", "c", "ab", "bc", "abc"])
    assert merges_of_scores(made) == [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]
    assert len(merges_of_scores(table(substrings(30)))) > 3000


def test_vocabulary_of_special_tokens_is_an_error() -> None:
    made = table([f"<{number}>" for number in range(2**17 + 1)], kind=3)
    with pytest.raises(CheckpointError, match="special or user-defined"):
        made.added()
