"""Vocabularies of GGUF files whose tokenizers would need far more memory than the file, or fail."""

from __future__ import annotations

import json
import random
import string
import tracemalloc

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.gguf.vocabulary import (
    _KINDS,
    TOKENIZER_KEY,
    TokenTable,
    merges_of_scores,
)
from tokenizers import Tokenizer


def table(tokens: list[str], kind: int = 1) -> TokenTable:
    count = len(tokens)
    return TokenTable(
        {
            f"{TOKENIZER_KEY}.tokens": tokens,
            f"{TOKENIZER_KEY}.token_type": np.full(count, kind, np.int32),
            f"{TOKENIZER_KEY}.scores": -np.arange(count, dtype=np.float32),
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
        made.list_added_tokens()


@pytest.mark.parametrize("kind", ["bert", "llama", "t5"])
@pytest.mark.parametrize("number", [None, 0, 1, 99])
@pytest.mark.parametrize("unknown", ["[UNK]", "<unk>", "", "\u2581other"])
def test_unknown_words_are_encoded_or_the_vocabulary_is_an_error(kind, number, unknown) -> None:
    made = table(["[PAD]", unknown, "\u2581hello", "l"])
    if number is not None:
        made.metadata = {**made.metadata, f"{TOKENIZER_KEY}.unknown_token_id": number}
    try:
        content = _KINDS[kind](made)
    except CheckpointError:
        assert kind == "bert"
        return
    content |= {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    content["post_processor"] = None
    Tokenizer.from_str(json.dumps(content)).encode("hello w\u00f6rld")
