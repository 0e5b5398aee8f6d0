"""Rows to documents: callbacks, renamed fields, contents, and dropped rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ed_data.config.media import Media
from ed_data.config.source import Inform
from ed_data.errors import DataError, did_you_mean, listing
from ed_data.kinds.fields import PAIR, has_field, unwrap_array
from ed_data.rows.audio import RECORDING_KEYS, AudioReader
from ed_data.rows.contents import (
    check_content,
    checked_parts,
    get_field_names,
    get_kind,
    read_texts,
    separate_prompt,
    split_pair,
)
from ed_data.rows.example import Example, RowAudio, RowImage, RowVideo, image_key
from ed_data.rows.formats import FORMAT_FIELDS, ROW_FORMATS, convert_row, detect_format
from ed_data.rows.images import ImageReader
from ed_data.rows.media_files import MediaFolder
from ed_data.rows.template import template_arguments
from ed_data.rows.videos import read_videos
from ed_data.schema import (
    IMAGE,
    OPTIONAL_FIELDS,
    TEXT,
    TOOLS,
    Content,
    Row,
    Schema,
    read_cell,
)
from ed_data.sources import Cursor, FolderSource, Source, open_source, records, shard_sizes
from ed_data.sources.lines import START, LineRecord, Spot
from ed_data.sources.python import resolve_address

log = logging.getLogger("ed_data")


@dataclass
class Tally:
    """Statistics of the rows of an inform.

    Attributes:
        rows: number of rows that were read.
        dropped: number of rows that did not become documents, by reason.
        examples: the first dropped row for each reason.
    """

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, location: str) -> None:
        """Count a dropped row."""
        self.dropped[reason] += 1
        self.examples.setdefault(reason, location)

    def add(self, later_tally: Tally) -> None:
        """Add the counts of a later tally."""
        self.rows += later_tally.rows
        self.dropped.update(later_tally.dropped)
        self.examples = {**later_tally.examples, **self.examples}

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {"rows": self.rows, "dropped": dict(self.dropped), "examples": self.examples}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        """Return the tally of the values that `as_json` returned."""
        return cls(
            int(values.get("rows", 0)),
            Counter(values.get("dropped") or {}),
            dict(values.get("examples") or {}),
        )

    def __str__(self) -> str:
        reasons = (
            f"{count} rows: {reason} (the first: {self.examples[reason]})"
            for reason, count in self.dropped.items()
        )
        return "; ".join(reasons) or "no row was dropped"


class Placed(NamedTuple):
    """A document of a row (None if dropped), its position, and that of the next document."""

    example: Example | None
    at: Cursor
    next_cursor: Cursor


class Documents:
    """The documents of an inform, readable from any position.

    Args:
        inform: options of the source and its rows.
        source: the rows; opened if omitted.
        schema: the fields of a document.
        tally: counts dropped rows.
        media: places outside of the data set whose files rows may name.
        tools: JSON schemas for chats without the field `tools`.
    """

    def __init__(
        self,
        inform: Inform,
        source: Source | None = None,
        schema: Schema = TEXT,
        tally: Tally | None = None,
        media: Media | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.inform, self.schema, self.media, self.tools = inform, schema, media, tools
        self.source = source or open_source(inform)
        self.tally = tally or Tally()
        self.shards = shard_sizes(self.source)
        self._name = f"inform {inform.label!r}"  # prefix of the messages of all rows
        self._callback = function(inform, "format_callback")
        self._prepare = function(inform, "preprocessing_fn")
        # Field of the schema → field of the row.
        self._names = {name: name for name in schema.fields}
        self._content_is_named = "content_field" in inform.model_fields_set
        if self._content_is_named:
            self._names[schema.content] = inform.content_field
        if inform.text_field is not None:
            self._names[schema.content] = inform.text_field
            self._content_is_named = True
        self._other_content = () if self._content_is_named else schema.other_content
        self._detected: set[str] = set()
        self._needs_image = inform.is_visual or schema.kind.has_image
        self._folders: dict[int, MediaFolder] = {}
        self._parts = {column.field: column for column in schema.columns if column.in_parts}
        self._lists = schema.lists
        # The fields that follow the content as answers.
        self._answers = tuple(
            column.field
            for column in schema.columns
            if column.context == schema.content and not column.in_parts
        )
        self._keys = {schema.content: "text_field" if inform.text_field else "content_field"}
        self._columns = None
        if self._callback is None and not inform.format_fields:
            column_names = [*self._names.values(), *inform.additional_fields]
            column_names += [value.field for value in schema.values]
            column_names += [value.other_field for value in schema.values if value.other_field]
            for name, count in self._lists.items():
                column_names += get_field_names(name, count + 1)
            column_names += OPTIONAL_FIELDS
            column_names += PAIR if schema.kind.read_pair is not None else ()
            column_names += self._other_content
            media_fields = inform.image_field, inform.pixel_field, inform.audio_field
            column_names += [name for name in media_fields if name is not None]
            if not self._content_is_named:
                column_names += [TEXT.content, *FORMAT_FIELDS]
            self._columns = list(dict.fromkeys(column_names))

    def __iter__(self) -> Iterator[Example]:
        """Yield the documents in the order of the rows."""
        return (placed.example for placed in self.iterate_rows() if placed.example is not None)

    def iterate_rows(self) -> Iterator[Placed]:
        """Yield the rows in order, including dropped rows, at most `num_rows`."""
        remaining_rows = self.inform.num_rows
        for shard in range(len(self.shards)):
            for placed in self.read(shard):
                yield placed
                if remaining_rows is None or placed.next_cursor.spot.part:
                    continue
                if (remaining_rows := remaining_rows - 1) == 0:
                    return

    def read(self, shard: int, start: Spot = START) -> Iterator[Placed]:
        """Yield the documents of a shard of the source from a position, including dropped rows.

        Raises:
            DataError: a row is invalid, and `on_error` is not `skip`.
        """
        skipped_parts = start.part
        for record in records(self.source, shard, self._columns, start._replace(part=0)):
            self.tally.rows += not skipped_parts
            examples: list[Example | None]
            try:
                examples = self.convert(record, shard)
            except DataError as error:
                if self.inform.on_error == "raise":
                    raise
                self.tally.drop("skipped, because of an error", str(error))
                examples = [None]
            spots = [record.at._replace(part=part) for part in range(len(examples))]
            next_spots = [*spots[1:], record.next_spot]
            for example, at, next_spot in zip(examples, spots, next_spots, strict=True):
                if at.part >= skipped_parts:
                    yield Placed(example, Cursor(shard, at), Cursor(shard, next_spot))
            skipped_parts = 0

    def outline(self) -> dict[str, object]:
        """Return the dependencies of the documents that are known without reading them.

        For files these are names and sizes, so a copy on another machine counts as the same data.

        Raises:
            DataError: a function cannot be hashed.
        """
        about = getattr(self.source, "outline", None) or self.source.fingerprint
        return {"source": about, **_facts(self.inform, self.schema)}

    @cached_property
    def first_row(self) -> Row | None:
        """The first row with converted fields; None if it is missing or invalid."""
        first = next((r for i in range(len(self.shards)) for r in records(self.source, i)), None)
        if first is None or isinstance(first.row, DataError):
            return None
        try:
            return self._format_row(first.row, first.place)
        except DataError:  # the error is raised again when the row is read
            return None

    def has_completions(self) -> bool:
        """Return whether the first row has a prompt and its completion instead of a content."""
        completions = self.schema.kind.other_schema
        if completions is None or self._content_is_named:
            return False
        row = self.first_row or {}
        return {*completions.fields} <= row.keys() and self.schema.content not in row

    def check_first_row(self) -> None:
        """Check that the method reads what the first row can teach.

        A field that `content_field` names explicitly is accepted, unless it is a prompt.

        Raises:
            DataError: the row has answers, such as `completion`, `chosen` and `rejected`, and the
                schema reads only the prompt, or a field that the inform does not name.
        """
        check_row = self.schema.kind.check_row
        if check_row is not None:
            name = self._names[self.schema.content]
            check_row(self.first_row or {}, name, self._content_is_named, self.inform.label)

    def _format_row(self, row: Row, location: str) -> Row | None:
        inform = self.inform
        if self._callback is not None:
            row = _call(self._callback, dict(row), "format_callback", location)
            if row is None:
                return None
            if not isinstance(row, dict):
                raise DataError(
                    f"{location}: format_callback returned a {type(row).__name__}; it must return "
                    "a "
                    "row (dict), or None to drop the row",
                    ("format_callback",),
                )
        if inform.format_fields:
            for old, new in inform.format_fields.items():
                _take(row, old, "format_fields", location)
                if new in row and new not in inform.format_fields:
                    raise DataError(
                        f"{location}: format_fields renames {old!r} to {new!r}, but the row "
                        "already "
                        f"has a field {new!r}: rename that field too, or remove it in "
                        "format_callback",
                        ("format_fields",),
                    )
            row = {inform.format_fields.get(name, name): value for name, value in row.items()}
        return self._convert_row(row, location)

    def _convert_row(self, row: Row, location: str) -> Row:
        """Return a row of a published format with the fields that the schema reads."""
        name = self.inform.format
        if name is None and not self._content_is_named and not self._is_readable(row):
            name = detect_format(row)
            if name is not None and name not in self._detected:
                self._detected.add(name)
                log.info(
                    "inform %s: the rows have the format %s (%s)",
                    self.inform.label,
                    name,
                    ROW_FORMATS[name].about,
                )
        row = row if name is None else convert_row(name, row, location)
        complete_row = self.schema.kind.complete_row
        if complete_row is not None and not self._is_readable(row):
            return complete_row(row)
        return row

    def _is_readable(self, row: Row) -> bool:
        """Return whether a row has the fields with text that the schema reads."""
        other_schema = self.schema.kind.other_schema
        if other_schema is not None:
            return self.schema.content in row or {*other_schema.fields} <= row.keys()
        return all(name in row for name in self._names.values()) or self._has_implicit_prompt(row)

    @cached_property
    def _images(self) -> ImageReader:
        return ImageReader(self.inform, required=self.schema.kind.has_image)

    @cached_property
    def _audio(self) -> AudioReader:
        return AudioReader(self.inform)

    def _folder(self, shard: int) -> MediaFolder:
        """Return the folder whose files the rows of a shard may name."""
        if shard not in self._folders:
            source = self.source
            folders = source.media_folders(shard) if isinstance(source, FolderSource) else ()
            self._folders[shard] = MediaFolder(folders, self.media)
        return self._folders[shard]

    def convert(self, record: LineRecord, shard: int) -> list[Example | None]:
        """Return the documents of a row: one, or two if a method reads the answers of a pair.

        Raises:
            DataError: the row is invalid.
        """
        if isinstance(record.row, DataError):
            raise record.row
        location = f"{self._name}, {record.place}"
        row = self._format_row(record.row, location)
        if row is None:
            self.tally.drop("dropped by format_callback", record.place)
            return [None]
        rows = (row,)
        if self._reads_pair(row):
            rows = split_pair(row, self.schema.kind, self._names[self.schema.content], location)
        return [self._document(row, record.place, location, shard) for row in rows]

    def _reads_pair(self, row: Row) -> bool:
        """Return whether a preference pair is a row of another kind."""
        if self.schema.kind.read_pair is None or not all(has_field(row, side) for side in PAIR):
            return False
        absent = [field for field, name in self._names.items() if not has_field(row, name)]
        return bool(absent) and not (self._content_is_named and self.schema.content in absent)

    def _document(self, row: Row, place: str, location: str, shard: int) -> Example | None:
        fields: dict[str, Content] = {}
        implicit = self._has_implicit_prompt(row)
        for name, from_field in self._names.items():
            if implicit and name == self.schema.content:
                fields[name] = ""
                continue
            if name == IMAGE and self.schema.kind.has_image:  # its key follows below
                fields[name] = ""
                continue
            if name in self._lists:
                exact = self.schema.kind.needs_all_texts
                fields[name] = read_texts(row, name, self._lists[name], location, exact=exact)
                continue
            is_content = name == self.schema.content
            if is_content and from_field not in row:
                from_field = next((f for f in self._other_content if f in row), from_field)
            value = _take(row, from_field, self._keys.get(name, "format_fields"), location)
            reason = f"{from_field!r} is {'null' if value is None else 'empty'}"
            if self._prepare is not None and value is not None:
                value = _call(self._prepare, value, "preprocessing_fn", location)
                reason = "dropped by preprocessing_fn" if value is None else reason
            if name in self._parts:
                words = self._parts[name].words
                content = checked_parts(value, from_field, location, is_content, words=words)
            else:
                content = check_content(value, from_field, location, is_content)
            if content is None and name in self.schema.learned:
                self.tally.drop(reason, place)
                return None
            fields[name] = content or ""
        extra = {
            n: _take(row, n, "additional_fields", location) for n in self.inform.additional_fields
        }
        if self._needs_image:
            name = str(self._images.field)
            if _take(row, name, self._images.key, location) is None:
                self.tally.drop(f"{name!r} is null", place)
                return None
        answers = {field: fields[field] for field in self._answers}
        if answers:
            row_prompt = None if implicit else fields[self.schema.content]
            prompt, answers = separate_prompt(row_prompt, answers, location)
            fields = {**fields, self.schema.content: prompt, **answers}
        is_chat = any(get_kind(content) == "chat" for content in fields.values())
        images: list[RowImage] = []
        if is_chat or self._needs_image:
            folder = self._folder(shard)
            fields, images = self._images.read_row(row, fields, folder, location)
        if self.schema.kind.has_image:
            fields = self._with_key(fields, images, location)
        visuals: list[RowImage | RowVideo] = [*images]
        if is_chat:
            fields, visuals = read_videos(row, fields, images, self._folder(shard), location)
        recordings: list[RowAudio] = []
        if self.schema.kind.has_audio:
            audio = self._audio.read_recording(row, self._folder(shard), location)
            if isinstance(audio, str):
                self.tally.drop(audio, place)
                return None
            recordings.append(audio)
        elif is_chat:
            chat_audio = self._audio.read_chat(row, fields, self._folder(shard), location)
            if isinstance(chat_audio, str):
                self.tally.drop(chat_audio, place)
                return None
            fields, recordings = chat_audio
        template = template_arguments(row, location) if is_chat else {}
        if is_chat and self.tools:
            template.setdefault(TOOLS, list(self.tools))
        values = self._values(row, fields, location)
        return Example(fields, extra, place, values, tuple(visuals), template, tuple(recordings))

    def _with_key(
        self, fields: dict[str, Content], images: list[RowImage], location: str
    ) -> dict[str, Content]:
        """Return the fields, in which a text that identifies the image represents the image."""
        if len(images) != 1:
            raise DataError(
                f"{location}: a row of {self.schema.task} has one image, got {len(images)}: split "
                "the "
                "row",
                ("image_field",),
            )
        if self.schema.content != IMAGE:
            return fields
        return {**fields, IMAGE: image_key(images[0].source)}

    def _has_implicit_prompt(self, row: Row) -> bool:
        """Return whether the prompt of a row is the common prefix of its answers."""
        absent = not self._content_is_named and not has_field(row, self.schema.content)
        answers = [self._names[field] for field in self._answers]
        return absent and len(answers) > 1 and row.keys() >= {*answers}

    def _values(
        self, row: Row, fields: dict[str, Content], location: str
    ) -> tuple[float | tuple[float, ...], ...]:
        columns = {column.name: column for column in self.schema.columns}
        result: list[float | tuple[float, ...]] = []
        for value in self.schema.values:
            if value.default is not None and read_cell(row.get(value.field)) is None:
                result.append(value.default)
                continue
            if value.token_types:
                result.append(0.0)
                continue
            field = value.field
            if value.other_field in row and field not in row:
                field = value.other_field
            field_value = _take(row, field, "format_fields", location)
            # The name of a class may look like a number.
            field_value = field_value if field_value in value.classes else read_cell(field_value)
            column, read_value = columns[value.column], self.schema.kind.read_value
            if not column.in_parts:
                read = read_value(field_value, value, self.schema, fields, field, location)
                result.append(read)
                continue
            field_value = unwrap_array(field_value)
            parts = fields[column.field]
            if not isinstance(field_value, list | tuple) or len(field_value) != len(parts):
                kind = "words" if column.words else "steps"
                raise DataError(
                    f"{location}: {field!r} must have one number for each of the {len(parts)} "
                    f"{kind} of {column.field!r}, got {field_value!r}; correct the row"
                )
            result.append(
                tuple(
                    read_value(item, value, self.schema, fields, field, location)
                    for item in field_value
                )
            )
        return tuple(result)


def documents(
    inform: Inform,
    source: Source | None = None,
    schema: Schema = TEXT,
    media: Media | None = None,
) -> Iterator[Example]:
    """Yield the documents of an inform, in the order of its rows.

    Rows are dropped if a field with loss is empty, or if a function returns None for them.
    `Documents` counts dropped rows.

    Raises:
        DataError: a field does not exist or has the wrong type, or a function fails.
    """
    return iter(Documents(inform, source, schema, media=media))


def _facts(inform: Inform, schema: Schema) -> dict[str, object]:
    facts: dict[str, object] = {
        "content_field": inform.content_field,
        "num_rows": inform.num_rows,
        "format_fields": inform.format_fields,
        "format_callback": _hash_function(inform, "format_callback"),
        "preprocessing_fn": _hash_function(inform, "preprocessing_fn"),
    }
    if inform.is_visual:
        facts["visual"] = [inform.image_field, inform.pixel_field, inform.text_field]
    if schema.kind.has_audio or RECORDING_KEYS & inform.model_fields_set:
        limits = inform.min_duration_in_seconds, inform.max_duration_in_seconds
        facts["audio"] = [inform.audio_field, *limits]
    if inform.format is not None:
        facts["format"] = inform.format
    if inform.on_error != "raise":
        facts["on_error"] = inform.on_error
    return facts if schema.kind.is_text else {**facts, "schema": schema.as_json()}


def fingerprint_documents(
    inform: Inform, source: Source, schema: Schema = TEXT
) -> dict[str, object]:
    """Return everything that the documents of an inform depend on, as JSON values.

    Raises:
        DataError: a function cannot be hashed, so its results cannot be cached.
    """
    return {"source": source.fingerprint, **_facts(inform, schema)}


def function(inform: Inform, key: str) -> Callable[..., Any] | None:
    """Return the function of `format_callback` or `preprocessing_fn`; a name is imported.

    Raises:
        DataError: the name cannot be imported, or is not a function.
    """
    value = getattr(inform, key)
    if isinstance(value, str):
        try:
            value = resolve_address(value, inform.label)
        except DataError as error:
            raise DataError(str(error), (key,)) from error
        if not callable(value):
            raise DataError(
                f"inform {inform.label!r}: {key} must be a function, got a {type(value).__name__}",
                (key,),
            )
    return value


def _call(call: Callable[..., Any], value: object, key: str, location: str) -> Any:
    try:
        return call(value)
    except Exception as error:  # a user function may raise any error
        raise DataError(
            f"{location}: {key} raised {type(error).__name__}: {error}; correct the function or "
            "the row, or return None to drop the row",
            (key,),
        ) from error


def _hash_function(inform: Inform, key: str) -> str | None:
    value = function(inform, key)
    if value is None:
        return None
    from datasets.fingerprint import Hasher  # hashes code and closure values

    try:
        return Hasher.hash(value)
    except Exception as error:
        raise DataError(
            f"inform {inform.label!r}: {key} cannot be hashed for the cache ({error}); "
            "use a function defined in a module",
            (key,),
        ) from error


def _take(row: Row, name: str, key: str, location: str) -> Any:
    if name not in row:
        raise DataError(
            f"{location}: there is no field {name!r} (fields: {listing(row)})"
            f"{did_you_mean(name, row)}; correct {key} or the row",
            (key,),
        )
    return row[name]
