"""Batches of encoder-decoder models and of sequence classification."""

from __future__ import annotations

import numpy as np
import pytest
from ed_data import DataError, Schema, build_loader
from ed_data.schema import CLASSIFICATION, SEQ2SEQ, Column, Value

PAIRS = [{"prompt": f"translate {i}", "completion": "word " * (i % 5 + 1)} for i in range(24)]
START = 7


def seq2seq(mixture, tokenizer, rows=PAIRS, length=48, **options):
    made = mixture(rows, **{"pack_seq_length": length, **options})
    return build_loader(
        made,
        tokenizer,
        batch_size=3,
        seq_length=length,
        schema=SEQ2SEQ,
        decoder_start_token_id=START,
        shuffle=False,
    )


def first(loader):
    return next(iter(loader))


@pytest.mark.parametrize("how", [{}, {"streaming": True}, {"pack_on_the_fly": True}])
@pytest.mark.parametrize("packed", [False, True])
def test_decoder_inputs_are_the_labels_shifted_right(mixture, tokenizer, how, packed):
    options = {"pack_tokens": packed, "pack_seq_length": 48, "pack_shuffle": False, **how}
    batch = first(seq2seq(mixture, tokenizer, **options))
    assert sorted(batch) == [
        "decoder_input_ids",
        "decoder_position_ids",
        "decoder_segment_ids",
        "input_ids",
        "labels",
        "position_ids",
        "segment_ids",
    ]
    assert (batch["segment_ids"].max(axis=1) > 1).any() == packed
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for row in range(3):
        count = batch["segment_ids"][row].max()
        assert count == batch["decoder_segment_ids"][row].max()
        for segment in range(1, count + 1):
            source = batch["input_ids"][row][batch["segment_ids"][row] == segment]
            here = batch["decoder_segment_ids"][row] == segment
            labels = batch["labels"][row][here]
            inputs = batch["decoder_input_ids"][row][here]
            number = int(tokenizer.decode(source, skip_special_tokens=True).split()[1])
            text = tokenizer.decode(labels, skip_special_tokens=True)
            assert text == PAIRS[number]["completion"]
            assert labels[-1] == source[-1] == eos
            assert inputs[0] == START
            assert np.array_equal(inputs[1:], labels[:-1])
        unused = batch["decoder_segment_ids"][row] == 0
        assert (batch["labels"][row][unused] == -100).all()
        assert (batch["decoder_input_ids"][row][unused] == pad).all()


def test_encoder_and_decoder_are_padded_separately(mixture, tokenizer):
    rows = [{"prompt": "long " * 20, "completion": "a"}] * 3
    options = {"pack_tokens": False, "tokenization": {"padding": "longest"}}
    batch = first(seq2seq(mixture, tokenizer, rows, 256, **options))
    assert batch["decoder_input_ids"].shape == batch["labels"].shape == (3, 8)
    assert batch["input_ids"].shape[1] > 8
    assert batch["input_ids"].shape[1] % 8 == 0


def test_hosts_create_their_rows_of_encoder_decoder_batches(mixture, tokenizer):
    loader = seq2seq(mixture, tokenizer, pack_tokens=True, pack_seq_length=48)
    whole = loader.batch_at(1)
    parts = [loader.for_rows([row]).batch_at(1) for row in range(3)]
    for name, values in whole.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), values)


def test_start_token_is_part_of_the_fingerprint(mixture, tokenizer):
    loader = seq2seq(mixture, tokenizer)
    other = build_loader(
        mixture(PAIRS, pack_seq_length=48),
        tokenizer,
        batch_size=3,
        shuffle=False,
        schema=SEQ2SEQ,
        decoder_start_token_id=1,
    )
    assert loader.fingerprint != other.fingerprint


def test_start_token_is_required_exactly_for_encoder_decoders(mixture, tokenizer):
    with pytest.raises(DataError, match="requires decoder_start_token_id"):
        build_loader(mixture(PAIRS), tokenizer, schema=SEQ2SEQ)
    with pytest.raises(DataError, match="other schemas do not use it"):
        build_loader(mixture(), tokenizer, decoder_start_token_id=1)


def test_rows_without_a_target_are_named(mixture, tokenizer):
    with pytest.raises(DataError, match=r"data\.jsonl:1: there is no field 'completion'"):
        seq2seq(mixture, tokenizer, [{"prompt": "a"}])


@pytest.mark.parametrize("how", [{}, {"streaming": True}])
def test_labels_of_classification_are_one_integer_per_row(mixture, tokenizer, how):
    rows = [{"text": f"text {i}", "label": i % 3} for i in range(9)]
    made = mixture(rows, pack_tokens=False, tokenization={"return_attention_mask": True}, **how)
    batch = first(
        build_loader(
            made, tokenizer, batch_size=4, seq_length=32, schema=CLASSIFICATION, shuffle=False
        )
    )
    assert sorted(batch) == [
        "attention_mask",
        "input_ids",
        "labels",
        "position_ids",
        "segment_ids",
    ]
    assert batch["labels"].dtype == np.int32
    assert batch["labels"].tolist() == [0, 1, 2, 0]


def test_empty_rows_of_evaluation_have_no_class(mixture, tokenizer):
    rows = [{"text": f"text {i}", "label": 1} for i in range(10)]
    made = mixture(rows, pack_tokens=False, eval_fraction=0.3)
    loader = build_loader(
        made, tokenizer, batch_size=4, seq_length=32, schema=CLASSIFICATION, split="eval"
    )
    assert loader.batch_at(0)["labels"].tolist() == [1, 1, 1, -100]


def test_invalid_class_is_named(mixture, tokenizer):
    for label in ("good", 0.5, -1, None):
        rows = [{"text": "a", "label": 0}, {"text": "b", "label": label}]
        with pytest.raises(
            DataError, match=r"data\.jsonl:2: 'label' must be the number of a class"
        ):
            build_loader(
                mixture(rows, pack_tokens=False), tokenizer, seq_length=8, schema=CLASSIFICATION
            )


def test_classification_rows_cannot_be_packed(mixture, tokenizer):
    with pytest.raises(DataError, match="one label per row, so rows cannot be packed"):
        build_loader(mixture([{"text": "a", "label": 0}]), tokenizer, schema=CLASSIFICATION)


def test_invalid_schema_of_a_task_is_refused():
    with pytest.raises(DataError, match="task seq2seq_lm has the columns"):
        Schema((Column("", "content"),), task="seq2seq_lm")
    with pytest.raises(DataError, match="task sequence_classification has the columns"):
        Schema((Column("", "content"),), values=(Value("x", "y"),), task="sequence_classification")
