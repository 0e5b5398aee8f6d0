"""Rows of text tasks: negatives, scores, relevance, choices, and questions about a context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.schema import (
    RELEVANCE,
    SCORED_PAIR,
    SEQ2SEQ_PREFERENCE,
    answer_schema,
    choice_schema,
    embedding_schema,
)

CONTEXT = "The sheep lives in the north. The goat lives in the south, near the old mill. " * 4
QUESTIONS = [
    {
        "question": f"Where does the {animal} live, number {i}?",
        "context": CONTEXT,
        "answers": {"text": [place], "answer_start": [CONTEXT.index(place, 90 * (i % 3))]},
    }
    for i in range(8)
    for animal, place in (("sheep", "in the north"), ("goat", "near the old mill"))
] + [{"question": "Who?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}}]


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    """A tokenizer of BERT's kind, with a classification token and a separator."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [CONTEXT, *[row["question"] for row in QUESTIONS]]
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special)
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return BertTokenizerFast(tokenizer_object=made)


def load(mixture: Any, rows: list[dict[str, Any]], schema: Any, tokenizer: Any, **options: Any):
    given = {"pack_tokens": False, "pack_seq_length": None, "tokenization": {"max_length": 48}}
    made = mixture(rows, **{**given, **options})
    return build_loader(made, tokenizer, batch_size=len(rows), schema=schema, shuffle=False)


def features(tokenizer: Any, rows: list[dict[str, Any]], length: int, stride: int):
    """Return features as `prepare_train_features` of transformers' `run_qa.py` computes them."""
    made = tokenizer(
        [row["question"] for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    spans = []
    for i, offsets in enumerate(made["offset_mapping"]):
        cls = made["input_ids"][i].index(tokenizer.cls_token_id)
        ids, answers = made.sequence_ids(i), rows[made["overflow_to_sample_mapping"][i]]["answers"]
        if not answers["answer_start"]:
            spans.append((cls, cls))
            continue
        start = answers["answer_start"][0]
        stop = start + len(answers["text"][0])
        first, last = 0, len(ids) - 1
        while ids[first] != 1:
            first += 1
        while ids[last] != 1:
            last -= 1
        if not (offsets[first][0] <= start and offsets[last][1] >= stop):
            spans.append((cls, cls))
            continue
        while first < len(offsets) and offsets[first][0] <= start:
            first += 1
        while offsets[last][1] >= stop:
            last -= 1
        spans.append((first - 1, last + 1))
    return made["input_ids"], made["token_type_ids"], spans


@pytest.mark.parametrize("stride", [0, 16])
def test_windows_of_a_context_equal_the_features_of_run_qa(
    mixture: Any, wordpiece: Any, stride: int
) -> None:
    ids, types, spans = features(wordpiece, QUESTIONS, 48, stride)
    assert len(ids) > 2 * len(QUESTIONS), "the contexts are longer than a window"
    loader = load(mixture, QUESTIONS, answer_schema(stride), wordpiece)
    assert loader.stats["documents"] == len(ids)
    batches = [loader.batch_at(step) for step in range(-(-len(ids) // len(QUESTIONS)))]
    rows = {name: np.concatenate([b[name] for b in batches])[: len(ids)] for name in batches[0]}
    for number, tokens in enumerate(ids):
        count = len(tokens)
        assert rows["input_ids"][number, :count].tolist() == tokens
        assert rows["segment_ids"][number].sum() == count
        assert rows["token_type_ids"][number, :count].tolist() == types[number]
        found = rows["start_positions"][number], rows["end_positions"][number]
        assert found == spans[number]
    texts = {
        wordpiece.decode(rows["input_ids"][i, first : last + 1])
        for i, (first, last) in enumerate(spans)
        if first
    }
    assert texts == {"in the north", "near the old mill"}


def test_windows_without_special_tokens_end_with_the_end_token(
    mixture: Any, tokenizer: Any
) -> None:
    loader = load(mixture, QUESTIONS[:4], answer_schema(8), tokenizer)
    batch = loader.batch_at(0)
    lengths = batch["segment_ids"].sum(axis=1)
    last = batch["input_ids"][np.arange(len(lengths)), lengths - 1]
    assert (last == tokenizer.eos_token_id).all()
    assert lengths.max() == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {"text": ["nowhere"], "answer_start": [3]}}, "does not contain the answer"),
        ({"answers": "in the north"}, "must be {'text'"),
    ],
)
def test_wrong_answer_names_its_row(
    mixture: Any, wordpiece: Any, change: Any, message: str
) -> None:
    rows = [QUESTIONS[0], {**QUESTIONS[1], **change}]
    with pytest.raises(DataError, match=f"line 2.*{message}|{message}"):
        load(mixture, rows, answer_schema(8), wordpiece)


@pytest.mark.parametrize("name", ["streaming", "pack_on_the_fly"])
def test_windows_need_the_cache(mixture: Any, wordpiece: Any, name: str) -> None:
    with pytest.raises(DataError, match=f"set {name}: false"):
        load(mixture, QUESTIONS, answer_schema(8), wordpiece, **{name: True})


@pytest.mark.parametrize(
    "negatives",
    [
        {"negative_1": "n 0", "negative_2": "n 1"},
        {"negative": ["n 0", "n 1", "a further text"]},
    ],
)
def test_negatives_have_the_segment_of_their_anchor(
    mixture: Any, tokenizer: Any, negatives: dict[str, Any]
) -> None:
    rows = [{"anchor": f"a {i}", "positive": f"p {i}", **negatives} for i in range(6)]
    packing = {"pack_tokens": True, "pack_seq_length": 48}
    loader = load(mixture, rows, embedding_schema(2), tokenizer, **packing)
    batch = loader.batch_at(0)
    last = {side: batch[f"{side}_segment_ids"].max() for side in ("anchor", "negative_2")}
    assert last["anchor"] == last["negative_2"] > 1
    here = batch["negative_2_segment_ids"][0] == 2
    assert tokenizer.decode(batch["negative_2_input_ids"][0][here]) == "<|bos|>n 1<|eos|>"


def test_too_few_negatives_are_an_error(mixture: Any, tokenizer: Any) -> None:
    rows = [{"anchor": "a", "positive": "p", "negative": ["n"]}]
    with pytest.raises(DataError, match="'negative' must be a list of 2 texts"):
        load(mixture, rows, embedding_schema(2), tokenizer)


@pytest.mark.parametrize("score", [[2.0, 3.5], [5.0, 3.0, 1.5]])
def test_margins_are_differences_of_scores(
    mixture: Any, tokenizer: Any, score: list[float]
) -> None:
    rows = [{"anchor": "a", "positive": "p", "negative": ["n", "m"], "score": score}]
    batch = load(mixture, rows, embedding_schema(2, margins=True), tokenizer).batch_at(0)
    assert (batch["margin_1"][0, 0], batch["margin_2"][0, 0]) == (2.0, 3.5)


def test_scores_follow_their_pairs(mixture: Any, tokenizer: Any) -> None:
    rows = [{"sentence1": f"a {i}", "sentence2": f"b {i}", "label": i / 4} for i in range(4)]
    packing = {"pack_tokens": True, "pack_seq_length": 48}
    batch = load(mixture, rows, SCORED_PAIR, tokenizer, **packing).batch_at(0)
    found = {
        float(score)
        for row, segments in zip(batch["score"], batch["sentence1_segment_ids"], strict=True)
        for score in row[segments > 0]
    }
    assert found == {0.0, 0.25, 0.5, 0.75}


def test_relevance_is_a_number_for_each_row(mixture: Any, wordpiece: Any) -> None:
    rows = [{"query": "sheep", "document": CONTEXT, "label": i / 2} for i in range(3)]
    batch = load(mixture, rows, RELEVANCE, wordpiece).batch_at(0)
    assert batch["labels"].tolist() == [0.0, 0.5, 1.0]
    expected = wordpiece("sheep", CONTEXT, truncation="longest_first", max_length=48)
    assert batch["input_ids"][0].tolist() == expected["input_ids"]
    assert batch["token_type_ids"][0].tolist() == expected["token_type_ids"]


@pytest.mark.parametrize("listed", [True, False])
def test_each_choice_is_a_pair_with_the_question(
    mixture: Any, wordpiece: Any, listed: bool
) -> None:
    texts = ["in the north", "near the old mill"]
    choices = (
        {"choices": texts} if listed else dict(zip(("choice_1", "choice_2"), texts, strict=True))
    )
    rows = [{"question": "Where?", **choices, "answer": i % 2} for i in range(4)]
    batch = load(mixture, rows, choice_schema(2), wordpiece).batch_at(0)
    assert batch["labels"].tolist() == [0, 1, 0, 1]
    for number, text in enumerate(texts, 1):
        expected = wordpiece("Where?", text)
        count = len(expected["input_ids"])
        assert batch[f"choice_{number}_input_ids"][0, :count].tolist() == expected["input_ids"]
        types = batch[f"choice_{number}_token_type_ids"][0]
        assert types[:count].tolist() == expected["token_type_ids"]
        assert not types[count:].any()


def test_another_number_of_choices_is_an_error(mixture: Any, wordpiece: Any) -> None:
    rows = [{"question": "Where?", "choices": ["a", "b", "c"], "label": 0}]
    with pytest.raises(DataError, match="must be a list of 2 texts"):
        load(mixture, rows, choice_schema(2), wordpiece)


def test_answers_of_an_encoder_decoder_share_the_segment_of_the_prompt(
    mixture: Any, tokenizer: Any
) -> None:
    rows = [{"prompt": f"{i} + 1 =", "chosen": f"{i + 1}", "rejected": "no"} for i in range(6)]
    packing = {"pack_tokens": True, "pack_seq_length": 48}
    batch = load(mixture, rows, SEQ2SEQ_PREFERENCE, tokenizer, **packing).batch_at(0)
    for row in range(len(batch["input_ids"])):
        last = batch["segment_ids"][row].max()
        for side in ("chosen", "rejected"):
            assert batch[f"{side}_segment_ids"][row].max() == last
    here = batch["chosen_segment_ids"][0] == 1
    assert tokenizer.decode(batch["chosen_input_ids"][0][here]) == "<|bos|>1<|eos|>"
