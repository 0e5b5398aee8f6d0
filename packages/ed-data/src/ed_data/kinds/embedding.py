"""Texts that are compared: pairs for embeddings, and documents that are ranked for a query."""

from __future__ import annotations

from ed_data.kinds.fields import Column, Value
from ed_data.kinds.record import KindOfRows, Schema
from ed_data.kinds.targets import refuse_packing

_PAIR = KindOfRows({"anchor": "the sum of 2 and 2", "positive": "2 plus 2"})
#: Two texts with the same meaning, for embeddings: `anchor_input_ids`, …, `positive_input_ids`, ….
EMBEDDING = Schema(
    (Column("anchor", "anchor"), Column("positive", "positive")), "anchor", record=_PAIR
)
#: Two texts and the `score` of their similarity: `sentence1_input_ids`, ….
SCORED_PAIR = Schema(
    (Column("sentence1", "sentence1"), Column("sentence2", "sentence2")),
    "sentence1",
    (Value("score", "score", "sentence1", other_field="label"),),
    record=KindOfRows({"sentence1": "2 plus 2", "sentence2": "the sum of 2 and 2", "score": 0.9}),
)
_CANDIDATES = KindOfRows(
    {"query": "2 plus 2", "positive": "It is 4.", "negative": ["It is 5.", "It is 6."]},
    "sequence_ranking",
    checks=refuse_packing,
)


def embedding_schema(negatives: int = 0, *, margins: bool = False) -> Schema:
    """Return the schema of pairs of texts with negative texts.

    Args:
        negatives: number of negative texts of a row: `negative`, a text or a list of texts, or
            `negative_1`, `negative_2`, ….
        margins: whether rows have `score`: the margin by which a teacher prefers the positive text
            to each negative text, or the scores of the positive and of all negative texts.
    """
    columns = [
        Column(f"negative_{number + 1}", "negative", item=number) for number in range(negatives)
    ]
    values = [
        Value(f"margin_{number + 1}", "score", "anchor", other_field="label", margin=number)
        for number in range(negatives if margins else 0)
    ]
    return Schema((*EMBEDDING.columns, *columns), "anchor", tuple(values), record=_PAIR)


def candidate_schema(negatives: int) -> Schema:
    """Return the schema of a query with a positive document and negative documents.

    Rows have `query`, `positive`, and `negative`, a text or a list of texts, or `negative_1`,
    `negative_2`, …. Batches have `positive_input_ids`, … and `negative_<n>_input_ids`, … of the
    pairs with the query.
    """
    columns = [Column("positive", "query", second="positive")]
    columns += [
        Column(f"negative_{number + 1}", "query", second="negative", item=number)
        for number in range(negatives)
    ]
    types = [Value(f"{c.name}_token_type_ids", "", c.name, token_types=True) for c in columns]
    return Schema(tuple(columns), "query", tuple(types), record=_CANDIDATES)
