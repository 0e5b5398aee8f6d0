"""The schemas of documents: token columns, the fields they are made from, and labels.

A source yields rows. A row becomes a document, an `Example`, whose fields are named as in the
schema. Each column of the schema becomes one sequence of tokens, and a group of arrays in a batch.
Other data needs only another `Schema`: the rest of the package accepts any schema. The table
`ed_data.kinds.ROW_KINDS` contains the schemas, which this module contains in upper case.
"""

from __future__ import annotations

from ed_data.kinds import (
    CHOICE,
    CLASSIFICATION,
    COMPLETION,
    CTC,
    EMBEDDING,
    GOLD_PREFERENCE,
    IMAGE_CLASSIFICATION,
    IMAGE_TEXT,
    LABELLED,
    PAIR_CLASSIFICATION,
    PREFERENCE,
    PROMPT,
    QUESTION_ANSWERING,
    RELEVANCE,
    REWARD,
    REWARDED,
    ROW_KINDS,
    SCORED_PAIR,
    SEQ2SEQ,
    SEQ2SEQ_PREFERENCE,
    SPEECH_SEQ2SEQ,
    STEPS,
    TEXT,
    TOKEN_CLASSIFICATION,
)
from ed_data.kinds.classes import choice_schema
from ed_data.kinds.embedding import candidate_schema, embedding_schema
from ed_data.kinds.fields import (
    AUDIO,
    AUDIOS,
    IMAGE,
    IMAGES,
    KWARGS,
    NO_VALUE,
    OPTIONAL_FIELDS,
    TOOLS,
    Audio,
    Cell,
    Column,
    Content,
    Image,
    Message,
    Row,
    Value,
    read_cell,
)
from ed_data.kinds.record import Schema, Task
from ed_data.kinds.spans import STRIDE, answer_schema

__all__ = [
    "AUDIO",
    "AUDIOS",
    "CHOICE",
    "CLASSIFICATION",
    "COMPLETION",
    "CTC",
    "EMBEDDING",
    "GOLD_PREFERENCE",
    "IMAGE",
    "IMAGES",
    "IMAGE_CLASSIFICATION",
    "IMAGE_TEXT",
    "KWARGS",
    "LABELLED",
    "NO_VALUE",
    "OPTIONAL_FIELDS",
    "PAIR_CLASSIFICATION",
    "PREFERENCE",
    "PROMPT",
    "QUESTION_ANSWERING",
    "RELEVANCE",
    "REWARD",
    "REWARDED",
    "SCORED_PAIR",
    "SEQ2SEQ",
    "SEQ2SEQ_PREFERENCE",
    "SPEECH_SEQ2SEQ",
    "STEPS",
    "STRIDE",
    "TEXT",
    "TOKEN_CLASSIFICATION",
    "TOOLS",
    "Audio",
    "Cell",
    "Column",
    "Content",
    "Image",
    "Message",
    "Row",
    "Schema",
    "Task",
    "Value",
    "answer_schema",
    "candidate_schema",
    "choice_schema",
    "embedding_schema",
    "read_cell",
]


def __getattr__(name: str) -> Schema:
    if name.lower() not in ROW_KINDS or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ROW_KINDS[name.lower()]
