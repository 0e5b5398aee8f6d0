"""Options of the methods that choose a class, a choice or a place. Free of jax."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from ed_infra.options import Count
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import RowKind, StrictFlag, TrainingArguments, conflict


class ClassifierArguments(TrainingArguments):
    """Options of the classes."""

    ROWS: ClassVar[str]

    label_names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the classes, in the order of their numbers. Rows may contain names or numbers.
    `config.json` of the model contains the names (`id2label`, `label2id`)."""
    num_labels: Count | None = None
    """Number of classes. None: the number of `label_names`, or that of the model."""

    @field_validator("label_names")
    @classmethod
    def _differ(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({*value}) < len(value):
            raise conflict(f"label_names {list(value)}: each class needs a different name")
        return value

    @field_validator("num_labels")
    @classmethod
    def _counts_names(cls, value: int | None, info: ValidationInfo) -> int | None:
        names = info.data.get("label_names", ())
        if names and value not in (None, len(names)):
            raise conflict(f"num_labels is {value}, and label_names has {len(names)}: omit one")
        return value

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind(self.ROWS)

    @property
    def config_fields(self) -> dict[str, Any]:
        """The fields of the model's configuration that the classes determine."""
        names = self.label_names
        if not names:
            return {} if self.num_labels is None else {"num_labels": self.num_labels}
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }


class SequenceClassificationArguments(ClassifierArguments):
    """Classification of texts, or of pairs of texts: the cross-entropy of the class of each row."""

    ROWS = "classification"

    trainer_type: Literal["sequence_classification"] = "sequence_classification"
    text_pairs: StrictFlag = False
    """Classify pairs of texts: rows also have `text_pair`, and the model reads token types."""

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        return RowKind(f"pair_{self.ROWS}" if self.text_pairs else self.ROWS)


class TokenClassificationArguments(ClassifierArguments):
    """Classification of words, such as names of entities: the cross-entropy of the class of each
    word, at its first token. With class names such as `B-PER`, the F1 of entities is logged."""

    ROWS = "token_classification"

    trainer_type: Literal["token_classification"] = "token_classification"


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
