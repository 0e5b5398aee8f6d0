"""A prompt and its answer, of which only the answer has loss; its label, its reward, its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ed_data.errors import KeyPath
from ed_data.kinds.fields import CHOSEN, REJECTED, Column, Row, Value
from ed_data.kinds.record import KindOfRows, Schema

if TYPE_CHECKING:
    from ed_data.config import Mixture

#: Fields that contain a whole text or chat.
_WHOLE_ROWS = ("content", "messages")
_ANSWER = Column("", "completion", "prompt")
_EXAMPLE: Row = {"prompt": "2 + 2 =", "completion": " 4"}


def complete_row(row: Row) -> Row:
    """Return a text or a chat among rows with completions as an answer: all of it is learned.

    Args:
        row: a row without a prompt or without a completion.

    Returns:
        the row with an empty prompt, and its text or chat as the completion; a row without text is
        returned unchanged.
    """
    content = next((field for field in _WHOLE_ROWS if field in row), None)
    return row if content is None else {**row, "prompt": "", "completion": row[content]}


def ask_prompt(pair: Row) -> tuple[Row, ...]:
    """Return a preference pair as a row with a prompt, which keeps the answers of the pair."""
    return (pair,)


def unpair_answers(pair: Row) -> tuple[Row, ...]:
    """Return a good and a bad answer for a preference pair."""
    sides = ((CHOSEN, True), (REJECTED, False))
    return tuple({**pair, "completion": pair[side], "label": label} for side, label in sides)


def refuse_exclusion(mixture: Mixture, schema: Schema) -> Iterator[tuple[KeyPath, str]]:
    """Yield `exclude`: prompts have no places in rows."""
    del schema
    if mixture.exclude is not None:
        reason = (
            "exclude keeps the places of documents in rows, but a method that samples generates "
            "completions for each prompt: omit exclude, and remove the rows from the data"
        )
        yield ("exclude",), reason


#: A prompt for rollouts; see `ed_data.batches.prompts`.
PROMPT = Schema(
    (Column("", "prompt"),),
    "prompt",
    record=KindOfRows(
        {"prompt": "2 + 2 ="},
        keeps_fields=True,
        read_pair=ask_prompt,
        needs_prompt=True,
        checks=refuse_exclusion,
    ),
)
#: A prompt and its answer; only the answer has loss.
COMPLETION = Schema((_ANSWER,), "prompt", record=KindOfRows(_EXAMPLE, complete_row=complete_row))
#: An answer with a `label`: 1 if it is good, else 0 (KTO).
LABELLED = Schema(
    (_ANSWER,),
    "prompt",
    (Value("label", "label"),),
    record=KindOfRows({**_EXAMPLE, "label": True}, read_pair=unpair_answers),
)
#: An answer with a `reward`.
REWARDED = Schema(
    (_ANSWER,),
    "prompt",
    (Value("reward", "reward"),),
    record=KindOfRows({**_EXAMPLE, "reward": 0.5}),
)
#: An answer in steps, each correct or not: `step_labels` at the last token of each step.
STEPS = Schema(
    (Column("", "completions", "prompt", steps=True),),
    "prompt",
    (Value("step_labels", "labels"),),
    record=KindOfRows(
        {
            "prompt": "What is 2 + 2 + 1?",
            "completions": ["2 + 2 = 4.", "4 + 1 = 6."],
            "labels": [True, False],
        }
    ),
)
