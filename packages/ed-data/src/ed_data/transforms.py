"""From rows to documents: callbacks, renamed fields, the content, what is dropped."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ed_data.config import Inform
from ed_data.errors import DataError, did_you_mean, listing
from ed_data.sources import OpenOptions, Source, open_source
from ed_data.sources.python import resolve

log = logging.getLogger("ed_data")

#: A text, chat messages, or token ids.
Content = str | list[dict[str, Any]] | list[int]


@dataclass(frozen=True, slots=True)
class Document:
    """The content of one row, with the fields that `additional_fields` keeps."""

    content: Content
    extra: dict[str, Any] = field(default_factory=dict)
    row: int = 0

    @property
    def digest(self) -> int:
        """A 64-bit hash of the content: the same content has it in every file and every run."""
        data = (
            self.content
            if isinstance(self.content, str)
            else json.dumps(self.content, sort_keys=True, ensure_ascii=False)
        )
        raw = hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(raw, "little")


def documents(inform: Inform, source: Source | None = None) -> Iterator[Document]:
    """Yield the documents of an inform, in the order of its rows.

    Rows whose content is empty, or that a function drops by returning None, are left out.

    Raises:
        DataError: a field does not exist, or a content is of another kind.
    """
    source = source or open_source(inform, OpenOptions())
    callback = _function(inform, "format_callback", inform.format_callback)
    prepare = _function(inform, "preprocessing_fn", inform.preprocessing_fn)
    columns = None
    if callback is None and not inform.format_fields:
        columns = list(dict.fromkeys([inform.content_field, *inform.additional_fields]))
    empty = 0
    for index, row in enumerate(islice(source.rows(columns), inform.num_rows)):
        if callback is not None:
            row = callback(dict(row))
            if row is None:
                continue
            if not isinstance(row, dict):
                raise DataError(
                    f"inform {inform.label!r}, row {index}: format_callback returned a "
                    f"{type(row).__name__}; it returns a row (dict), or None to drop it"
                )
        if inform.format_fields:
            row = _renamed(row, inform, index)
        content = _take(row, inform.content_field, "content_field", inform, index)
        if prepare is not None and content is not None:
            content = prepare(content)
        content = _checked(content, inform, index)
        if content is None:
            empty += 1
            continue
        extra = {
            name: _take(row, name, "additional_fields", inform, index)
            for name in inform.additional_fields
        }
        yield Document(content, extra, index)
    if empty:
        log.info("inform %s: left out %d rows with nothing in them", inform.label, empty)


def fingerprint(inform: Inform, source: Source) -> dict[str, Any]:
    """What the documents of an inform depend on, as JSON values.

    Raises:
        DataError: a function cannot be hashed, so that its results could not be cached safely.
    """
    return {
        "source": source.fingerprint,
        "content_field": inform.content_field,
        "num_rows": inform.num_rows,
        "format_fields": inform.format_fields,
        "format_callback": _hash_function(inform, "format_callback", inform.format_callback),
        "preprocessing_fn": _hash_function(inform, "preprocessing_fn", inform.preprocessing_fn),
    }


def _function(inform: Inform, key: str, value: Callable[..., Any] | str | None) -> Any:
    if isinstance(value, str):
        value = resolve(value, inform.label)
        if not callable(value):
            raise DataError(f"inform {inform.label!r}: {key} names a {type(value).__name__}")
    return value


def _hash_function(inform: Inform, key: str, value: Callable[..., Any] | str | None) -> str | None:
    function = _function(inform, key, value)
    if function is None:
        return None
    from datasets.fingerprint import Hasher  # by code and by the values it closes over

    try:
        return Hasher.hash(function)
    except Exception as error:
        raise DataError(
            f"inform {inform.label!r}: {key} cannot be hashed for the cache ({error}); "
            "use a function of a module"
        ) from error


def _renamed(row: dict[str, Any], inform: Inform, index: int) -> dict[str, Any]:
    mapping = inform.format_fields or {}
    for old in mapping:
        _take(row, old, "format_fields", inform, index)
    return {mapping.get(name, name): value for name, value in row.items()}


def _take(row: dict[str, Any], name: str, key: str, inform: Inform, index: int) -> Any:
    if name not in row:
        raise DataError(
            f"inform {inform.label!r}, row {index}: there is no field {name!r} "
            f"(fields: {listing(row)}){did_you_mean(name, row)}; correct {key}"
        )
    return row[name]


def _checked(content: Any, inform: Inform, index: int) -> Content | None:
    """The content, or None where it is empty."""
    if content is None:
        return None
    if isinstance(content, str):
        return content if content.strip() else None
    if hasattr(content, "tolist"):
        content = content.tolist()
    if isinstance(content, (list, tuple)):
        items = list(content)
        if not items:
            return None
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return items
        if all(isinstance(item, dict) and "role" in item and "content" in item for item in items):
            return items
        raise DataError(
            f"inform {inform.label!r}, row {index}: the list in {inform.content_field!r} holds "
            "neither chat messages {'role': …, 'content': …} nor token ids"
        )
    raise DataError(
        f"inform {inform.label!r}, row {index}: {inform.content_field!r} is a "
        f"{type(content).__name__}; it must be a text, a list of chat messages or of token ids"
    )
