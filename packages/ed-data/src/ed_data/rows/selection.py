"""Rows that a person names, and the hashes of their documents.

A row is named by its number, by the value of a field, or by its content in a file. Its documents
are identified by `Example.digest`, so copies of a row have the same hash, in every file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.rows.documents import Documents
from ed_data.rows.exclusion import parse_hashes
from ed_data.rows.splits import choose_schema, default_cache_dir, file_cache, prefix_error_path
from ed_data.schema import Schema
from ed_data.sources import open_source, records

_NUMBERS = re.compile(r"(?:(?P<inform>[^=]+):)?(?P<numbers>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")


class SelectedRow(NamedTuple):
    """A document of a selected row.

    Attributes:
        hash: `Example.digest` as 16 hexadecimal digits.
        inform: name of the inform; empty for a hash from a file.
        row: number of the row in the inform, from 0; None for a row from another file.
        place: file and line, for messages.
    """

    hash: str
    inform: str = ""
    row: int | None = None
    place: str = ""


@dataclass
class RowSelector:
    """What selects rows, parsed from texts.

    Attributes:
        numbers: name of an inform (empty: the only inform) -> numbers of rows.
        values: names of fields and the texts of their values.
        files: files with rows in the format of the training data.
        hashes: hashes from files.
    """

    numbers: dict[str, set[int]] = field(default_factory=dict)
    values: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    hashes: list[SelectedRow] = field(default_factory=list)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> RowSelector:
        """Parse `3,7-9`, `INFORM:3`, `FIELD=VALUE`, and paths of files.

        A JSON file with hashes (see `read_hashes`) selects documents by their hashes. Any other
        file has rows.

        Raises:
            DataError: a text has another form, or its file does not exist.
        """
        selector = cls()
        for text in texts:
            numbers = _NUMBERS.fullmatch(text)
            name, sign, value = text.partition("=")
            if Path(text).is_file():
                hashes = parse_hashes(Path(text))
                if hashes is None:
                    selector.files.append(text)
                else:
                    selector.hashes += [SelectedRow(one, place=text) for one in hashes]
            elif numbers is not None:
                chosen = selector.numbers.setdefault(numbers["inform"] or "", set())
                for part in numbers["numbers"].split(","):
                    first, _, last = part.partition("-")
                    chosen.update(range(int(first), int(last or first) + 1))
            elif sign and name:
                selector.values.append((name, value))
            else:
                raise DataError(
                    f"{text!r} selects no rows: write numbers from 0 (3,7-9, or INFORM:3 with "
                    "several informs), FIELD=VALUE, or the path of a file with rows or hashes"
                )
        return selector

    def matches(self, row: Mapping[str, object], number: int, inform: str, *, alone: bool) -> bool:
        """Return whether a row is selected by its number or by a field.

        Args:
            row: the stored row.
            number: its number in the inform.
            inform: name of the inform.
            alone: whether the mixture has no other inform.
        """
        if number in self.numbers.get(inform, ()) or (alone and number in self.numbers.get("", ())):
            return True
        return any(name in row and str(row[name]) == value for name, value in self.values)


def select_rows(
    mixture: Mixture, texts: Sequence[str], *, schema: Schema, cache_dir: str | None = None
) -> list[SelectedRow]:
    """Return the documents of the training rows that texts select; see `RowSelector.parse`.

    Args:
        mixture: the sources. Rows of `eval_informs` are not searched.
        texts: selections.
        schema: the columns of a document.
        cache_dir: used if `mixture.cache_dir` is not set.

    Raises:
        DataError: a selection is invalid, or selects no row.
    """
    selector = RowSelector.parse(texts)
    labels = [inform.label for inform in mixture.informs]
    for name in selector.numbers:
        if (name or len(labels) > 1) and labels.count(name) != 1:
            raise DataError(
                f"the number of a row needs the name of its inform, got {name!r}: write "
                f"INFORM:NUMBER (informs: {', '.join(labels)})"
            )
    files = file_cache(mixture, mixture.cache_dir or cache_dir or default_cache_dir())
    schema = choose_schema(mixture, schema, files)
    selected = list(selector.hashes)
    for number, inform in enumerate(mixture.informs):
        with prefix_error_path("informs", number):
            documents = Documents(inform, open_source(inform, files), schema, media=mixture.media)
            if selector.numbers or selector.values:
                alone = len(labels) == 1
                selected += _search(documents, selector, alone=alone)
            selected += _read_rows(inform, selector.files, schema, mixture)
    if not selected:
        raise DataError(f"no row of the training data is selected by {', '.join(texts)}")
    return list({row.hash: row for row in reversed(selected)}.values())[::-1]


def _search(documents: Documents, selector: RowSelector, *, alone: bool) -> Iterator[SelectedRow]:
    """Yield the documents of the rows of an inform that numbers or fields select."""
    label, number = documents.inform.label, -1
    for shard in range(len(documents.shards)):
        for record in records(documents.source, shard):
            number += 1
            if documents.inform.num_rows is not None and number >= documents.inform.num_rows:
                return
            if isinstance(record.row, DataError):
                continue
            if selector.matches(record.row, number, label, alone=alone):
                for example in documents.convert(record, shard):
                    if example is not None:
                        digest = f"{example.digest:016x}"
                        yield SelectedRow(digest, label, number, record.place)


def _read_rows(
    inform: Inform, paths: Sequence[str], schema: Schema, mixture: Mixture
) -> Iterator[SelectedRow]:
    """Yield the documents of rows in other files, which are read as the rows of an inform."""
    for path in paths:
        values = inform.model_dump(exclude_unset=True, exclude={"type", "data_files", "split"})
        given = Inform(**{**values, "name": inform.label, "data_files": path, "num_rows": None})
        for example in Documents(given, open_source(given), schema, media=mixture.media):
            yield SelectedRow(f"{example.digest:016x}", inform.label, None, example.place)
