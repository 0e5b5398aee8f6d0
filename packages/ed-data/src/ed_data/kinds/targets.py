"""Targets of whole rows: the number of a class, and a label for each row of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ed_data.errors import DataError, KeyPath, did_you_mean
from ed_data.kinds.fields import Content, Value
from ed_data.kinds.record import Schema

if TYPE_CHECKING:
    from ed_data.config import Mixture
    from ed_data.kinds.record import Batch


def refuse_packing(mixture: Mixture, schema: Schema) -> Iterator[tuple[KeyPath, str]]:
    """Yield `pack_tokens`: a row with one target contains one document."""
    if mixture.pack_tokens:
        task = schema.task.replace("_", " ")
        reason = f"{task} has one label per row, so rows cannot be packed: set pack_tokens: false"
        yield ("pack_tokens",), reason


def place_classes(batch: Batch, pad_id: int, start: int | None) -> Batch:
    """Return the arrays of a batch with the classes of its rows as `labels` int32 [b]."""
    batch["labels"] = batch.pop("label")[:, 0].astype("int32")
    return batch


def read_class(
    item: object,
    value: Value,
    schema: Schema,
    fields: Mapping[str, Content],
    field: str,
    location: str,
) -> float:
    """Return the number of a class; see `KindOfRows.read_value`."""
    return get_class_number(item, field, location, value.classes)


def get_class_number(
    value: object, field: str, location: str, classes: tuple[str, ...] = ()
) -> float:
    """Return the number of a class.

    Args:
        value: the number, or one of the names in `classes`.
        field: name of the field.
        location: the row, for messages.
        classes: names of all classes; empty if only numbers are allowed.

    Raises:
        DataError: the value is neither the number nor the name of a class.
    """
    if isinstance(value, str) and value in classes:
        return float(classes.index(value))
    if isinstance(value, int) and value >= 0 and (not classes or value < len(classes)):
        return float(value)
    if classes:
        similar = did_you_mean(value, classes) if isinstance(value, str) else ""
        raise DataError(
            f"{location}: {field!r} must be a class, got {value!r}{similar}; label_names has "
            f"{len(classes)} classes: use their names or the numbers 0 to {len(classes) - 1}"
        )
    raise DataError(
        f"{location}: {field!r} must be the number of a class, an integer of at least 0, got "
        f"{value!r}; set label_names to use the names of classes"
    )
