"""Options of the methods that find an answer: in a context, or among choices. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.rows import RowKind


class QuestionAnsweringArguments(TrainingArguments):
    """Extractive question answering: the first and the last token of an answer in a context."""

    DEFAULT_LENGTH = 384
    trainer_type: Literal["question_answering"] = "question_answering"
    doc_stride: Annotated[int, Field(ge=0, le=2**20)] = 128
    """Number of tokens that consecutive windows of a long context share."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind("answer", {"stride": self.doc_stride})


class MultipleChoiceArguments(TrainingArguments):
    """Multiple choice: the cross-entropy of the right one of several texts."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["multiple_choice"] = "multiple_choice"
    num_choices: Annotated[int, Field(ge=2, le=64)] = 4
    """Number of choices of a row: `choices`, a list of texts, or `choice_1`, `choice_2`, …."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind("choice", {"choices": self.num_choices})

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the choices of a row."""
        return tuple(f"choice_{number + 1}" for number in range(self.num_choices))
