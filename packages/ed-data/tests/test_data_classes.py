"""Rows with classes: words with labels, pairs of texts, and names of classes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ed_data import DataError, build_loader, documents
from ed_data.config import Inform, Mixture
from ed_data.schema import CLASSIFICATION, PAIR_CLASSIFICATION, TOKEN_CLASSIFICATION

LABELS = ("O", "B-PER", "I-PER")
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ada", "love", "##lace", "wrote", "a", "b"]


@pytest.fixture(scope="module")
def wordpiece():
    """A tokenizer like BERT's."""
    from transformers import BertTokenizerFast

    return BertTokenizerFast(vocab={token: i for i, token in enumerate(VOCAB)})


@pytest.fixture
def mixture(tmp_path: Path):
    def make(rows, **options) -> Mixture:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"prefetch_workers": 0, **options}
        return Mixture(informs=[{"data_files": str(path)}], cache_dir=str(tmp_path), **options)

    return make


def batch_of(mixture, tokenizer, schema, rows, length=16, **options):
    made = mixture(rows, **options)
    loader = build_loader(
        made, tokenizer, batch_size=len(rows), seq_length=length, schema=schema, shuffle=False
    )
    return loader.batch_at(0)


@pytest.mark.parametrize("field", ["labels", "ner_tags"])
@pytest.mark.parametrize("packed", [False, True])
def test_first_piece_of_each_word_has_its_label(mixture, wordpiece, field, packed):
    rows = [
        {"tokens": ["ada", "lovelace", "wrote"], field: [1, "I-PER", "O"]},
        {"tokens": ["a", "lovelace"], field: [0, 1]},
    ]
    schema = TOKEN_CLASSIFICATION.with_classes(LABELS)
    options = {"pack_tokens": True, "pack_seq_length": 16} if packed else {}
    batch = batch_of(mixture, wordpiece, schema, rows, **options)
    found = {}
    for row, segments in enumerate(batch["segment_ids"]):
        for number in range(1, segments.max() + 1):
            here = segments == number
            ids = wordpiece.convert_ids_to_tokens(batch["input_ids"][row][here].tolist())
            found[" ".join(ids)] = batch["labels"][row][here].tolist()
    assert found == {
        "[CLS] ada love ##lace wrote [SEP]": [-100, 1, 2, -100, 0, -100],
        "[CLS] a love ##lace [SEP]": [-100, 0, 1, -100, -100],
    }
    assert (batch["labels"][batch["segment_ids"] == 0] == -100).all()
    assert batch["labels"].dtype == np.int32


def test_pairs_have_the_tokens_and_types_of_transformers(mixture, wordpiece):
    texts = [("ada", "wrote a b"), ("a b a b a b a b a b", "ada lovelace wrote a b"), ("a", "")]
    rows = [{"text": a, "text_pair": b, "label": i % 2} for i, (a, b) in enumerate(texts)]
    batch = batch_of(mixture, wordpiece, PAIR_CLASSIFICATION, rows, length=12, pack_tokens=False)
    firsts, seconds = zip(*texts, strict=True)
    theirs = wordpiece(
        list(firsts), list(seconds), truncation=True, max_length=12, padding="max_length"
    )
    np.testing.assert_array_equal(batch["input_ids"], theirs["input_ids"])
    np.testing.assert_array_equal(batch["token_type_ids"], theirs["token_type_ids"])
    np.testing.assert_array_equal(batch["segment_ids"], theirs["attention_mask"])
    assert batch["labels"].tolist() == [0, 1, 0]
    assert batch["token_type_ids"].dtype == np.int32


def test_tokenizer_without_token_types_gives_zeros(mixture, wordpiece, monkeypatch):
    monkeypatch.setattr(wordpiece, "model_input_names", ["input_ids", "attention_mask"])
    rows = [{"text": "a", "text_pair": "b", "label": 0}]
    batch = batch_of(mixture, wordpiece, PAIR_CLASSIFICATION, rows, pack_tokens=False)
    assert not batch["token_type_ids"].any()


def read(tmp_path, row, schema):
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return list(documents(Inform(data_files=str(path)), schema=schema))


def test_names_of_classes_become_their_numbers(tmp_path):
    schema = CLASSIFICATION.with_classes(("bad", "good"))
    assert read(tmp_path, {"text": "a", "label": "good"}, schema)[0].values == (1.0,)
    assert read(tmp_path, {"text": "a", "label": 0}, schema)[0].values == (0.0,)


@pytest.mark.parametrize(
    ("row", "schema", "words"),
    [
        ({"text": "a", "label": "goood"}, CLASSIFICATION.with_classes(("bad", "good")), "'good'"),
        ({"text": "a", "label": 2}, CLASSIFICATION.with_classes(("bad", "good")), "0 to 1"),
        ({"text": "a", "label": "good"}, CLASSIFICATION, "set label_names"),
        ({"tokens": "a b", "labels": [0, 1]}, TOKEN_CLASSIFICATION, "a list of texts, the words"),
        ({"tokens": ["a", "b"], "labels": [0]}, TOKEN_CLASSIFICATION, "each of the 2 words"),
        ({"tokens": ["a"], "tags": [0]}, TOKEN_CLASSIFICATION, "there is no field 'labels'"),
        ({"text": "a", "label": 0}, PAIR_CLASSIFICATION, "there is no field 'text_pair'"),
    ],
)
def test_invalid_classes_are_named(tmp_path, row, schema, words):
    with pytest.raises(DataError, match=words):
        read(tmp_path, row, schema)


def test_document_ends_with_the_separator_of_an_encoder(mixture, wordpiece):
    rows = [{"text": "ada", "label": 0}]
    batch = batch_of(mixture, wordpiece, CLASSIFICATION, rows, pack_tokens=False)
    used = batch["input_ids"][0][batch["segment_ids"][0] > 0]
    assert wordpiece.convert_ids_to_tokens(used.tolist()) == ["[CLS]", "ada", "[SEP]"]
