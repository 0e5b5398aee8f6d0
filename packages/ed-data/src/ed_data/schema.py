"""The schema of documents: which columns of tokens a document has, and which fields make them.

A source yields rows. A row that is wanted becomes a document, an `Example`: its fields, named as in
the schema. Each column of the schema becomes one sequence of tokens, and a group of arrays in a
batch. Another kind of data is another `Schema`: the rest of the package takes any.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ed_data.errors import DataError

#: Fields by name, as a source has them.
Row = dict[str, Any]
Message = dict[str, Any]
#: A text, chat messages, or token ids.
Content = str | list[Message] | list[int]


@dataclass(frozen=True)
class Column:
    """One sequence of tokens of every document.

    Attributes:
        name: the arrays of a batch are `<name>_input_ids`, `<name>_labels`, and so on; `""` stands
            for `input_ids`, `labels`, and so on.
        field: the field that becomes tokens with loss.
        context: a field whose tokens come first, without loss; None where there is no such field.
    """

    name: str
    field: str
    context: str | None = None


@dataclass(frozen=True)
class Schema:
    """The columns of a document, from the fields of a row.

    A document of several columns is whole: it is cut at the length of a row, never split over two
    rows, and its columns have the same number in every `<name>_segment_ids`.

    Attributes:
        columns: at least one.
        content: the field that `Inform.content_field` renames. Documents of equal content are held
            out together.

    Raises:
        DataError: two columns have one name, or no column reads the content.
    """

    columns: tuple[Column, ...]
    content: str = "content"

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len({*names}) < len(names):
            raise DataError(f"a schema has columns of different names, not {names}")
        if all(self.content not in (c.field, c.context) for c in self.columns):
            raise DataError(f"no column of the schema reads the content, {self.content!r}")

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that a column reads, the content first."""
        read = [name for c in self.columns for name in (c.context, c.field) if name is not None]
        return tuple(dict.fromkeys([self.content, *read]))

    @property
    def learned(self) -> frozenset[str]:
        """The fields with loss: a row in which one of them is empty is left out."""
        return frozenset(column.field for column in self.columns)


#: A text, a chat, or token ids in one field.
TEXT = Schema((Column("", "content"),))
#: A prompt with a better and a worse answer: `chosen_input_ids`, …, `rejected_input_ids`, ….
PREFERENCE = Schema(
    (Column("chosen", "chosen", "prompt"), Column("rejected", "rejected", "prompt")), "prompt"
)


@dataclass(frozen=True, slots=True)
class Example:
    """A document: the fields of one row, named as in the schema.

    Attributes:
        fields: the contents, in the order of `Schema.fields`.
        extra: the row's `additional_fields`.
        place: file and line (or row) of the document, for messages.
    """

    fields: dict[str, Content]
    extra: Row = field(default_factory=dict)
    place: str = ""

    @property
    def content(self) -> Content:
        """The first field."""
        return next(iter(self.fields.values()))

    @property
    def digest(self) -> int:
        """A 64-bit hash of all fields: the same in every file and every run."""
        return _hash(self.content if len(self.fields) == 1 else self.fields)

    @property
    def content_digest(self) -> int:
        """A 64-bit hash of the content alone: it decides whether the document is held out."""
        return _hash(self.content)


def _hash(value: Content | dict[str, Content]) -> int:
    text = (
        value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "little")
