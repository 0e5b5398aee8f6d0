"""The fields of rows: contents, token columns, and numbers.

A source yields rows. A row becomes a document, an `Example`, whose fields are named as in its
schema. Each column becomes one sequence of tokens, and each value a number of the document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ed_data.conversation import Message
from ed_data.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from ed_data.media_access import RemoteFile

#: Fields by name, as stored in the source.
Row = dict[str, Any]
#: Optional fields of a row: arguments of the chat template, images and recordings of a chat.
TOOLS, KWARGS, IMAGES, IMAGE = "tools", "chat_template_kwargs", "images", "image"
AUDIOS, AUDIO = "audios", "audio"
OPTIONAL_FIELDS = (TOOLS, KWARGS, IMAGES, IMAGE, AUDIOS, AUDIO)

#: The fields of a preference pair: the better answer first.
CHOSEN, REJECTED = PAIR = ("chosen", "rejected")


class Cell(str):
    """The text of a cell of a csv or tsv file, which has no types.

    Text fields read the text. Fields with numbers read a number, `true`, `false`, or nothing.
    """

    __slots__ = ()

    @property
    def value(self) -> float | bool | str | None:
        """The number or boolean of the cell; None for an empty cell; another text unchanged."""
        text = self.strip()
        if not text or text.lower() in ("null", "none", "na", "nan"):
            return None
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            return str(self)


def unwrap_array(value: object) -> Any:
    """Return the list of an array; other values are returned unchanged."""
    convert = getattr(value, "tolist", None)
    return value if convert is None else convert()


def read_cell(value: object) -> Any:
    """Return the value of a cell of a text file; other values are returned unchanged."""
    return value.value if isinstance(value, Cell) else value


def has_field(row: Row, field: str) -> bool:
    """Return whether a row has a value; a null of a table, or an empty cell, is none."""
    value = row.get(field)
    return value is not None and not (isinstance(value, Cell) and not value.strip())


#: A text, chat messages, token ids, the steps of an answer, or the words of a text.
Content = str | list[Message] | list[int] | list[str]
#: A path or address, encoded bytes, both as in `datasets`, or pixels [height, width(, channels)].
Image: TypeAlias = "str | bytes | dict[str, Any] | np.ndarray | RemoteFile"
#: A path or address, encoded bytes, `{path, bytes}`, or `{array, sampling_rate}`, as in `datasets`.
Audio: TypeAlias = "str | bytes | dict[str, Any] | RemoteFile"


@dataclass(frozen=True)
class Column:
    """One sequence of tokens of each document.

    Attributes:
        name: prefix of the arrays in a batch: `<name>_input_ids`, `<name>_labels`, …; `""` means
            `input_ids`, `labels`, ….
        field: field whose tokens have loss.
        context: field whose tokens come first, without loss; None if there is no such field.
        steps: whether the field is a list of texts, the steps of an answer, each followed by a line
            end.
        words: whether the field is a list of words, of which the text consists.
        second: field with the second text of a pair; the tokenizer joins both texts.
        item: number of the text that the column reads, from 0, if its last field (`second`, or
            `field`) is a list of texts.
        stride: number of tokens that consecutive windows share. A pair that is longer than a row
            becomes several documents, which differ in the window of the second text. None: one
            document, which is truncated.
    """

    name: str
    field: str
    context: str | None = None
    steps: bool = False
    words: bool = False
    second: str | None = None
    item: int | None = None
    stride: int | None = None

    @property
    def listed(self) -> str | None:
        """The field with a list of texts, of which the column reads one."""
        return None if self.item is None else self.second or self.field

    @property
    def in_parts(self) -> bool:
        """Whether the field is a list of texts, which may have one value each."""
        return self.steps or self.words


#: Value of tokens without a value, as in labels.
NO_VALUE = -100.0


@dataclass(frozen=True)
class Value:
    """A number of each document, of each step of an answer, or of each word.

    In a batch it is a float32 array [b, s] with the number at each token of one column, at the
    last token of each step, or at the first token of each word, and -100 elsewhere. It is therefore
    packed like the tokens.

    Attributes:
        name: name of the array.
        field: field with a number, true or false; for steps and words a list of them.
        column: name of the column whose tokens have the value.
        default: value of rows without the field; None raises an error for such rows.
        other_field: field that is read if a row has no `field`.
        classes: names of classes, which the field may contain instead of their numbers.
        token_types: whether the numbers are the token types of a pair of texts (0 and 1), which the
            tokenizer returns; then the field is not read.
        margin: number of the negative text, from 0, whose margin the value is; see
            `read_margins`. None: the value is no margin.
    """

    name: str
    field: str
    column: str = ""
    default: float | None = None
    other_field: str | None = None
    classes: tuple[str, ...] = ()
    token_types: bool = False
    margin: int | None = None


def read_number(value: object, field: str, location: str) -> float:
    """Return a number; true is 1 and false is 0.

    Raises:
        DataError: the value is not a finite number.
    """
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise DataError(
            f"{location}: {field!r} must be a number, true or false, got {value!r}; correct the "
            "row, "
            "or drop it in format_callback"
        )
    return float(value)


def read_margins(value: object, count: int, field: str, location: str) -> list[float]:
    """Return the margin by which a teacher prefers a positive text to each negative text.

    Args:
        value: the margin of one negative text, a list of margins, or the scores of the positive and
            of all negative texts.
        count: number of negative texts.
        field: name of the field.
        location: the row, for messages.

    Raises:
        DataError: the number of values differs.
    """
    items = unwrap_array(value)
    values = list(items) if isinstance(items, list | tuple) else [items]
    if len(values) not in (count, count + 1):
        raise DataError(
            f"{location}: {field!r} must have {count} margins, or {count + 1} scores (of the "
            "positive "
            f"text, then of each negative text), got {items!r}; correct the row"
        )
    numbers = [read_number(item, field, location) for item in values]
    if len(numbers) == count:
        return numbers
    return [numbers[0] - negative_score for negative_score in numbers[1:]]
