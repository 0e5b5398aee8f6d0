"""A kind of rows: the fields of its rows, and how they become documents, tokens and batches.

A `Schema` states the fields, and its `KindOfRows` the differences between kinds. The loops that
read, encode and batch rows ask the record and name no kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ed_data.errors import DataError, KeyPath
from ed_data.kinds.fields import Column, Content, Row, Value, read_margins, read_number

if TYPE_CHECKING:
    import numpy as np

    from ed_data.config import Mixture

    Batch = dict[str, np.ndarray]

#: The training target of a document: its tokens, a second sequence, a class, a score, a choice, or
#: the position of an answer.
Task = Literal[
    "causal_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "sequence_scoring",
    "sequence_ranking",
    "multiple_choice",
    "question_answering",
    "speech_seq2seq",
    "ctc",
    "image_classification",
    "image_text",
]


def read_value(
    item: object,
    value: Value,
    schema: Schema,
    fields: Mapping[str, Content],
    field: str,
    location: str,
) -> float:
    """Return a number, or the margin of a negative text.

    Args:
        item: what the row contains.
        value: the number of the schema.
        schema: the schema of the row.
        fields: the contents of the row.
        field: name of the field with the item.
        location: the row, for messages.

    Raises:
        DataError: the item is not a finite number.
    """
    if value.margin is None:
        return read_number(item, field, location)
    count = sum(other.margin is not None for other in schema.values)
    return read_margins(item, count, field, location)[value.margin]


def keep_arrays(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return the arrays of a batch unchanged."""
    return batch


def find_no_remarks(mixture: Mixture, schema: Schema) -> Iterator[tuple[KeyPath, str]]:
    """Yield nothing: rows of the kind support every key."""
    return iter(())


@dataclass(frozen=True)
class KindOfRows:
    """What distinguishes a kind of rows from an answer to a prompt.

    Attributes:
        example: a row.
        task: the training target of a document. Caches name it.
        columns: names of the columns that a schema of the kind has; None if all are accepted.
        labels: names of the values that it has, without types of tokens; None if all are accepted.
        has_text: whether documents have tokens.
        has_image: whether each row has one image, which its tokens do not mention.
        has_audio: whether each row has a recording, whose transcript is its text.
        has_decoder: whether an encoder-decoder reads the batches.
        has_time_steps: whether a model scores the labels of each time step of a recording.
        has_windows: whether a long row becomes several documents.
        is_text: whether a row is one text, chat or list of ids. Caches do not state its schema, and
            `text_target_field` names it in saved rows.
        is_aligned: whether all columns of a batch have one width.
        keeps_fields: whether batches contain `additional_fields`.
        needs_all_texts: whether a list of texts has no more texts than the columns read.
        other_schema: schema of rows that a source of this kind may have instead.
        check_row: checks the first row, given the content field, whether the inform names it, and
            the name of the inform.
        complete_row: returns a row without the fields of the schema with these fields.
        read_pair: returns the rows of the kind that a preference pair becomes, given the pair with
            its prompt and with its answers without the prompt. None: the kind reads no pairs, or
            its own columns read them.
        needs_prompt: whether a row without a prompt is an error.
        read_value: returns a number of a document; see `read_value`.
        arrays: returns a batch for trainers, given all its arrays, the token of padding, and the
            first token of the decoder.
        checks: yields the keys of a mixture that rows of the kind do not support, and the reasons.
    """

    example: Row
    task: Task = "causal_lm"
    columns: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    has_text: bool = True
    has_image: bool = False
    has_audio: bool = False
    has_decoder: bool = False
    has_time_steps: bool = False
    has_windows: bool = False
    is_text: bool = False
    is_aligned: bool = True
    keeps_fields: bool = False
    needs_all_texts: bool = False
    other_schema: Schema | None = None
    check_row: Callable[[Row, str, bool, str], None] | None = None
    complete_row: Callable[[Row], Row] | None = None
    read_pair: Callable[[Row], tuple[Row, ...]] | None = None
    needs_prompt: bool = False
    read_value: Callable[[object, Value, Schema, Mapping[str, Content], str, str], float] = (
        read_value
    )
    arrays: Callable[[Batch, int, int | None], Batch] = keep_arrays
    checks: Callable[[Mixture, Schema], Iterator[tuple[KeyPath, str]]] = find_no_remarks

    @property
    def has_media(self) -> bool:
        """Whether each row has an image or a recording."""
        return self.has_image or self.has_audio


#: The record of schemas whose task and fields no kind of the table has.
ANSWERS = KindOfRows({"prompt": "2 + 2 =", "completion": " 4"})


@dataclass(frozen=True)
class Schema:
    """The columns of a document, made from the fields of a row.

    A document with several columns is truncated at the length of a row and never split over two
    rows. Its columns have the same number in every `<name>_segment_ids`.

    Attributes:
        columns: at least one.
        content: the field that `Inform.content_field` renames. Documents with equal content are
            held out together.
        values: numbers of the documents.
        task: the training target of a document. It determines the kind of the rows, unless the
            fields are those of a kind.
        other_content: fields that contain the content of a row without the field `content`, unless
            the inform names a field.
        record: the kind of the rows; None finds it in the table of kinds.

    Raises:
        DataError: columns or values share a name, a value names an unknown column, no column reads
            the content, or the task needs other columns.
    """

    columns: tuple[Column, ...]
    content: str = "content"
    values: tuple[Value, ...] = ()
    task: Task = "causal_lm"
    other_content: tuple[str, ...] = ()
    record: InitVar[KindOfRows | None] = None
    kind: KindOfRows = field(init=False, compare=False, repr=False)

    def __post_init__(self, record: KindOfRows | None) -> None:
        if record is None:
            from ed_data.kinds import find_kind  # the table contains schemas

            record = find_kind(self)
        else:
            object.__setattr__(self, "task", record.task)
        object.__setattr__(self, "kind", record)
        names = [column.name for column in self.columns]
        if not names or len({*names}) < len(names):
            raise DataError(f"the columns of a schema need different names, got {names}")
        if all(self.content not in (c.field, c.context, c.second) for c in self.columns):
            raise DataError(f"no column of the schema reads the content field {self.content!r}")

        value_names = [value.name for value in self.values]
        if len({*value_names}) < len(value_names):
            raise DataError(f"the values of a schema need different names, got {value_names}")
        for value in self.values:
            if value.column not in names:
                raise DataError(
                    f"the value {value.name!r} names the column {value.column!r}, but the columns "
                    f"are {names}"
                )
        self._check_kind(names)

    def _check_kind(self, names: list[str]) -> None:
        """Check that the schema has the columns and values of its kind."""
        if self.kind.labels is None:
            return
        columns = names if self.kind.columns is None else list(self.kind.columns)
        expected_labels = list(self.kind.labels)
        labels = [v.name for v in self.values if not (expected_labels and v.token_types)]
        if names != columns or labels != expected_labels:
            expected_values = f"the values {expected_labels}" if expected_labels else "no values"
            raise DataError(
                f"a schema of task {self.task} has the columns {columns} and {expected_values}, "
                f"got the columns {names} and the values {labels}"
            )

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; unused attributes are omitted, so older caches stay valid."""
        column_options = ("steps", "words", "second", "item", "stride")
        columns = [_drop_unused(asdict(c), column_options) for c in self.columns]
        later = ("other_field", "classes", "token_types", "margin")
        values = (
            {"values": [_drop_unused(asdict(v), later) for v in self.values]} if self.values else {}
        )
        task = {} if self.task == ANSWERS.task else {"task": self.task}
        return {"columns": columns, "content": self.content, **values, **task}

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields that the columns read, the content first."""
        every = [name for c in self.columns for name in (c.context, c.field, c.second)]
        read = [name for name in every if name is not None]
        return tuple(dict.fromkeys([self.content, *read]))

    @property
    def learned(self) -> frozenset[str]:
        """The fields with loss. A row in which one of them is empty is dropped."""
        return frozenset(column.field for column in self.columns)

    @property
    def lists(self) -> dict[str, int]:
        """Fields with lists of texts, and the number of texts that the columns read."""
        counts: dict[str, int] = {}
        for column in self.columns:
            if column.listed is not None and column.item is not None:
                counts[column.listed] = max(counts.get(column.listed, 0), column.item + 1)
        return counts

    def with_classes(self, names: tuple[str, ...]) -> Schema:
        """Return the schema whose labels may be names of classes."""
        values = tuple(replace(v, classes=names) if v.name == "label" else v for v in self.values)
        return replace(self, values=values, record=self.kind)


def _drop_unused(attributes: dict[str, Any], optional: tuple[str, ...]) -> dict[str, Any]:
    """Return the attributes without unused optional ones."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in optional or not (value is None or value is False or value == ())
    }
