"""The kinds of rows. A new kind is one file, whose schema is an entry of `ROW_KINDS`.

Everything else about a kind follows from its schema and from the record of the schema,
`ed_data.kinds.record.KindOfRows`. Code that reads, encodes and batches rows names no kind.
"""

from __future__ import annotations

from ed_data.kinds.answers import COMPLETION, LABELLED, PROMPT, REWARDED, STEPS
from ed_data.kinds.classes import (
    CHOICE,
    CLASSIFICATION,
    PAIR_CLASSIFICATION,
    RELEVANCE,
    TOKEN_CLASSIFICATION,
)
from ed_data.kinds.embedding import EMBEDDING, SCORED_PAIR, candidate_schema
from ed_data.kinds.image import IMAGE_CLASSIFICATION, IMAGE_TEXT
from ed_data.kinds.preference import (
    GOLD_PREFERENCE,
    PREFERENCE,
    REWARD,
    SEQ2SEQ_PREFERENCE,
)
from ed_data.kinds.record import ANSWERS, KindOfRows, Schema
from ed_data.kinds.seq2seq import SEQ2SEQ
from ed_data.kinds.spans import QUESTION_ANSWERING
from ed_data.kinds.speech import CTC, SPEECH_SEQ2SEQ
from ed_data.kinds.text import TEXT

#: The schema of each kind by the name that methods use; kinds with settings have those of two
#: negative texts, four choices, and the default stride.
ROW_KINDS: dict[str, Schema] = {
    "text": TEXT,
    "prompt": PROMPT,
    "completion": COMPLETION,
    "preference": PREFERENCE,
    "gold_preference": GOLD_PREFERENCE,
    "reward": REWARD,
    "seq2seq_preference": SEQ2SEQ_PREFERENCE,
    "labelled": LABELLED,
    "rewarded": REWARDED,
    "steps": STEPS,
    "embedding": EMBEDDING,
    "scored_pair": SCORED_PAIR,
    "candidate": candidate_schema(2),
    "seq2seq": SEQ2SEQ,
    "classification": CLASSIFICATION,
    "pair_classification": PAIR_CLASSIFICATION,
    "token_classification": TOKEN_CLASSIFICATION,
    "relevance": RELEVANCE,
    "choice": CHOICE,
    "question_answering": QUESTION_ANSWERING,
    "image_classification": IMAGE_CLASSIFICATION,
    "image_text": IMAGE_TEXT,
    "speech_seq2seq": SPEECH_SEQ2SEQ,
    "ctc": CTC,
}


def find_kind(schema: Schema) -> KindOfRows:
    """Return the kind whose schema is equal, else a kind with the same task."""
    schemas = ROW_KINDS.values()
    kind = next((entry.kind for entry in schemas if entry == schema), None)
    if kind is not None or schema.task == ANSWERS.task:
        return kind or ANSWERS
    return next((entry.kind for entry in schemas if entry.task == schema.task), ANSWERS)
