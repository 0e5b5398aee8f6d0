"""Texts and words with classes, pairs with a class or a score, and the number of a choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_data.kinds.fields import Column, Value
from ed_data.kinds.record import KindOfRows, Schema
from ed_data.kinds.targets import place_classes, read_class, refuse_packing

if TYPE_CHECKING:
    from ed_data.kinds.record import Batch


def place_word_classes(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return the arrays of a batch with the classes of words as `labels` int32 [b, s]."""
    batch["labels"] = batch.pop("label").astype("int32")
    return batch


def place_scores(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return the arrays of a batch with the scores of its rows as `labels` float32 [b]."""
    batch["labels"] = batch.pop("label")[:, 0]
    return batch


def create_text_kind(**example: object) -> KindOfRows:
    """Return the kind of texts with a class, given a row."""
    return KindOfRows(
        example,
        "sequence_classification",
        columns=("",),
        labels=("label",),
        read_value=read_class,
        arrays=place_classes,
        checks=refuse_packing,
    )


#: A text and the number of its class: `labels` [b].
CLASSIFICATION = Schema(
    (Column("", "text"),),
    "text",
    (Value("label", "label"),),
    record=create_text_kind(text="It works well.", label=1),
)
#: Two texts and the number of their class: `labels` [b], `token_type_ids` [b, s].
PAIR_CLASSIFICATION = Schema(
    (Column("", "text", second="text_pair"),),
    "text",
    (Value("label", "label"), Value("token_type_ids", "text_pair", token_types=True)),
    record=create_text_kind(text="How was it?", text_pair="It works well.", label=1),
)
#: Words and the numbers of their classes: `labels` [b, s] at the first token of each word.
TOKEN_CLASSIFICATION = Schema(
    (Column("", "tokens", words=True),),
    "tokens",
    (Value("label", "labels", other_field="ner_tags"),),
    record=KindOfRows(
        {"tokens": ["Rosa", "is", "in", "Oslo"], "labels": [1, 0, 0, 2]},
        "token_classification",
        columns=("",),
        labels=("label",),
        read_value=read_class,
        arrays=place_word_classes,
    ),
)
#: A query, a document and the `label` of the pair, a number: `labels` float32 [b].
RELEVANCE = Schema(
    (Column("", "query", second="document"),),
    "query",
    (
        Value("label", "label", other_field="score"),
        Value("token_type_ids", "document", token_types=True),
    ),
    record=KindOfRows(
        {"query": "2 plus 2", "document": "It is 4.", "label": 1.0},
        "sequence_scoring",
        columns=("",),
        labels=("label",),
        arrays=place_scores,
        checks=refuse_packing,
    ),
)
_CHOICES = KindOfRows(
    {"question": "What is 2 + 2?", "choices": ["3", "4", "5", "6"], "label": 1},
    "multiple_choice",
    labels=("label",),
    needs_all_texts=True,
    read_value=read_class,
    arrays=place_classes,
    checks=refuse_packing,
)


def choice_schema(choices: int) -> Schema:
    """Return the schema of a question with a number of choices, and the number of the right choice.

    Rows have `question`, `choices` (a list of texts, or `choice_1`, `choice_2`, …), and `label` or
    `answer`. Batches have `choice_<n>_input_ids`, …, from 1, and `labels` [b].
    """
    names = [f"choice_{number + 1}" for number in range(choices)]
    columns = [
        Column(name, "question", second="choices", item=number) for number, name in enumerate(names)
    ]
    types = [Value(f"{name}_token_type_ids", "", name, token_types=True) for name in names]
    label = Value("label", "label", names[0], other_field="answer")
    return Schema(tuple(columns), "question", (label, *types), record=_CHOICES)


#: A question with four choices: `choice_1_input_ids`, …, and `labels` [b].
CHOICE = choice_schema(4)
