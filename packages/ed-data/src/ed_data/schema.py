"""The schema of documents: which columns of tokens a document has, and which fields make them.

A source yields rows. A row that is wanted becomes a document, an `Example`: its fields, named as in
the schema. Each column of the schema becomes one sequence of tokens, and a group of arrays in a
batch. Another kind of data is another `Schema`: the rest of the package takes any.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ed_data.errors import DataError

#: Fields by name, as a source has them.
Row = dict[str, Any]
Message = dict[str, Any]
#: A text, chat messages, token ids, or the steps of an answer.
Content = str | list[Message] | list[int] | list[str]


@dataclass(frozen=True)
class Column:
    """One sequence of tokens of every document.

    Attributes:
        name: the arrays of a batch are `<name>_input_ids`, `<name>_labels`, and so on; `""` stands
            for `input_ids`, `labels`, and so on.
        field: the field that becomes tokens with loss.
        context: a field whose tokens come first, without loss; None where there is no such field.
        steps: the field is a list of texts, the steps of an answer; a line end closes each.
    """

    name: str
    field: str
    context: str | None = None
    steps: bool = False


#: In the array of a value: here is none (as in labels).
NO_VALUE = -100.0


@dataclass(frozen=True)
class Value:
    """A number of every document, or of each step of it, beside its tokens.

    The batch has it as float32 [b, s], at the tokens of one column: at each of them, or at the last
    token of each step. Elsewhere is -100, as in labels; so packing needs no other shape.

    Attributes:
        name: of the array.
        field: a number, true or false; for steps a list of them.
        column: the column at whose tokens it stands.
        default: where a row has no such field; None makes that an error.
    """

    name: str
    field: str
    column: str = ""
    default: float | None = None


@dataclass(frozen=True)
class Schema:
    """The columns of a document, from the fields of a row.

    A document of several columns is whole: it is cut at the length of a row, never split over two
    rows, and its columns have the same number in every `<name>_segment_ids`.

    Attributes:
        columns: at least one.
        content: the field that `Inform.content_field` renames. Documents of equal content are held
            out together.
        values: numbers beside the tokens.

    Raises:
        DataError: two columns or values have one name, a value stands at no column, or no column
            reads the content.
    """

    columns: tuple[Column, ...]
    content: str = "content"
    values: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len({*names}) < len(names):
            raise DataError(f"a schema has columns of different names, not {names}")
        if all(self.content not in (c.field, c.context) for c in self.columns):
            raise DataError(f"no column of the schema reads the content, {self.content!r}")

        taken = [value.name for value in self.values]
        if len({*taken}) < len(taken):
            raise DataError(f"the values of a schema have different names, not {taken}")
        for value in self.values:
            if value.column not in names:
                raise DataError(f"the value {value.name!r} stands at no column of {names}")

    def as_json(self) -> dict[str, Any]:
        """Return JSON values; what is not used is left out, as older caches have it."""
        columns = [{k: v for k, v in asdict(c).items() if k != "steps" or v} for c in self.columns]
        values = {"values": [asdict(v) for v in self.values]} if self.values else {}
        return {"columns": columns, "content": self.content, **values}

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that a column reads, the content first."""
        read = [name for c in self.columns for name in (c.context, c.field) if name is not None]
        return tuple(dict.fromkeys([self.content, *read]))

    @property
    def learned(self) -> frozenset[str]:
        """The fields with loss: a row in which one of them is empty is left out."""
        return frozenset(column.field for column in self.columns)


_ANSWER = Column("", "completion", "prompt")
#: A text, a chat, or token ids in one field.
TEXT = Schema((Column("", "content"),))
#: A prompt alone, for rollouts; see `ed_data.batches.prompts`.
PROMPT = Schema((Column("", "prompt"),), "prompt")
#: A prompt and its answer: the loss is on the answer alone.
COMPLETION = Schema((_ANSWER,), "prompt")
#: A prompt with a better and a worse answer: `chosen_input_ids`, …, `rejected_input_ids`, ….
PREFERENCE = Schema(
    (Column("chosen", "chosen", "prompt"), Column("rejected", "rejected", "prompt")), "prompt"
)
#: Such a pair, and by how much the one is better: `margin`, 0 where a row does not say.
REWARD = Schema(PREFERENCE.columns, "prompt", (Value("margin", "margin", "chosen", 0.0),))
#: An answer that is good or not (KTO): `label`, 1 or 0.
LABELLED = Schema((_ANSWER,), "prompt", (Value("label", "label"),))
#: An answer with a reward: `reward`.
REWARDED = Schema((_ANSWER,), "prompt", (Value("reward", "reward"),))
#: An answer in steps, each of which is right or not: `step_labels` at the end of each.
STEPS = Schema(
    (Column("", "completions", "prompt", steps=True),), "prompt", (Value("step_labels", "labels"),)
)
#: Two texts of one meaning, for embeddings: `anchor_input_ids`, …, `positive_input_ids`, ….
EMBEDDING = Schema((Column("anchor", "anchor"), Column("positive", "positive")), "anchor")


@dataclass(frozen=True, slots=True)
class Example:
    """A document: the fields of one row, named as in the schema.

    Attributes:
        fields: the contents, in the order of `Schema.fields`.
        extra: the row's `additional_fields`.
        place: file and line (or row) of the document, for messages.
        values: the numbers, in the order of `Schema.values`.
        image: of a visual row, as `ed_data.rows.images.Image`.
        template: arguments of the chat template; see `ed_data.rows.template`.
    """

    fields: dict[str, Content]
    extra: Row = field(default_factory=dict)
    place: str = ""
    values: tuple[float | tuple[float, ...], ...] = ()
    image: Any = None
    template: dict[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> Content:
        """The first field."""
        return next(iter(self.fields.values()))

    @property
    def digest(self) -> int:
        """A 64-bit hash of all fields: the same in every file and every run."""
        more: list[Any] = [self.template] if self.template else []
        if self.image is not None:
            return _hash([self.fields, self.values, _image_key(self.image), *more])
        if self.values or more:
            return _hash([self.fields, self.values, *more])
        return _hash(self.content if len(self.fields) == 1 else self.fields)

    @property
    def content_digest(self) -> int:
        """A 64-bit hash of the content alone: it decides whether the document is held out."""
        return _hash(self.content)


def _image_key(image: Any) -> str:
    if isinstance(image, dict):
        raw = image["bytes"]
    elif isinstance(image, bytes | str):
        raw = image
    else:  # pixels
        raw = f"{image.shape}{image.dtype}".encode() + image.tobytes()
    return hashlib.blake2b(raw).hexdigest() if isinstance(raw, bytes) else raw


def _hash(value: object) -> int:
    text = (
        value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    )
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "little")
