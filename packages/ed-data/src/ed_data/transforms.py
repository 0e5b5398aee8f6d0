"""From rows to documents: callbacks, renamed fields, contents, and rows that are left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from ed_data.errors import DataError, did_you_mean, listing
from ed_data.inform import Inform
from ed_data.schema import TEXT, Content, Example, Row, Schema
from ed_data.sources import Source, open_source
from ed_data.sources.python import resolve

log = logging.getLogger("ed_data")


def documents(
    inform: Inform, source: Source | None = None, schema: Schema = TEXT
) -> Iterator[Example]:
    """Yield the documents of an inform, in the order of its rows.

    Rows in which a learned field is empty, or that a function drops by returning None, are left
    out.

    Raises:
        DataError: a field does not exist or is of another kind, or a function fails.
    """
    source = source or open_source(inform)
    callback = function(inform, "format_callback")
    prepare = function(inform, "preprocessing_fn")
    # Field of the schema → field of the row.
    names = {name: name for name in schema.fields}
    if "content_field" in inform.model_fields_set:
        names[schema.content] = inform.content_field
    keys = {schema.content: "content_field"}
    columns = None
    if callback is None and not inform.format_fields:
        columns = list(dict.fromkeys([*names.values(), *inform.additional_fields]))
    empty = 0
    for place, row in islice(source.rows(columns), inform.num_rows):
        where = f"inform {inform.label!r}, {place}"
        if callback is not None:
            row = _call(callback, dict(row), "format_callback", where)
            if row is None:
                continue
            if not isinstance(row, dict):
                raise DataError(
                    f"{where}: format_callback returned a {type(row).__name__}; it returns a row "
                    "(dict), or None to drop it",
                    ("format_callback",),
                )
        if inform.format_fields:
            for old in inform.format_fields:
                _take(row, old, "format_fields", where)
            row = {inform.format_fields.get(name, name): value for name, value in row.items()}
        fields: dict[str, Content] = {}
        for name, field in names.items():
            value = _take(row, field, keys.get(name, "format_fields"), where)
            if prepare is not None and value is not None:
                value = _call(prepare, value, "preprocessing_fn", where)
            content = _checked(value, field, where)
            if content is not None or name not in schema.learned:
                fields[name] = content or ""
        if len(fields) < len(names):
            empty += 1
            continue
        extra = {n: _take(row, n, "additional_fields", where) for n in inform.additional_fields}
        yield Example(fields, extra, place)
    if empty:
        log.info("inform %s: left out %d rows with nothing in them", inform.label, empty)


def fingerprint(inform: Inform, source: Source, schema: Schema = TEXT) -> dict[str, object]:
    """Everything that the documents of an inform depend on, as JSON values.

    Raises:
        DataError: a function cannot be hashed, so that its results could not be cached safely.
    """
    facts: dict[str, object] = {
        "source": source.fingerprint,
        "content_field": inform.content_field,
        "num_rows": inform.num_rows,
        "format_fields": inform.format_fields,
        "format_callback": _hash_function(inform, "format_callback"),
        "preprocessing_fn": _hash_function(inform, "preprocessing_fn"),
    }
    return facts if schema == TEXT else {**facts, "schema": asdict(schema)}


def function(inform: Inform, key: str) -> Callable[..., Any] | None:
    """Return the function of `format_callback` or `preprocessing_fn`, imported where it is named.

    Raises:
        DataError: it cannot be imported, or is not a function.
    """
    value = getattr(inform, key)
    if isinstance(value, str):
        try:
            value = resolve(value, inform.label)
        except DataError as error:
            raise DataError(str(error), (key,)) from error
        if not callable(value):
            raise DataError(
                f"inform {inform.label!r}: {key} names a {type(value).__name__}, not a function",
                (key,),
            )
    return value


def _call(call: Callable[..., Any], value: Any, key: str, where: str) -> Any:
    try:
        return call(value)
    except Exception as error:  # whatever the user's function raises
        raise DataError(
            f"{where}: {key} fails with {type(error).__name__}: {error}; correct the function or "
            "the row, or return None to drop the row",
            (key,),
        ) from error


def _hash_function(inform: Inform, key: str) -> str | None:
    value = function(inform, key)
    if value is None:
        return None
    from datasets.fingerprint import Hasher  # by code and by the values it closes over

    try:
        return Hasher.hash(value)
    except Exception as error:
        raise DataError(
            f"inform {inform.label!r}: {key} cannot be hashed for the cache ({error}); "
            "use a function of a module",
            (key,),
        ) from error


def _take(row: Row, name: str, key: str, where: str) -> Any:
    if name not in row:
        raise DataError(
            f"{where}: there is no field {name!r} (fields: {listing(row)})"
            f"{did_you_mean(name, row)}; correct {key}, or the row",
            (key,),
        )
    return row[name]


def _checked(value: Any, field: str, where: str) -> Content | None:
    """The content, or None where it is empty."""
    if value is None:
        return None
    if isinstance(value, str):
        return value if value.strip() else None
    if hasattr(value, "tolist"):
        value = value.tolist()
    wrong = f"is a {type(value).__name__}; it must be a text, a list of chat messages or token ids"
    if isinstance(value, list | tuple):
        items = list(value)
        if not items:
            return None
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, dict) and "role" in item and "content" in item for item in items):
            return items
        wrong = "holds neither chat messages {'role': …, 'content': …} nor token ids"
    raise DataError(
        f"{where}: {field!r} {wrong}; correct the row, or return None for it in format_callback"
    )
