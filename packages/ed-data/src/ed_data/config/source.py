"""The options of one source of data (`Inform`), and the kinds of sources."""

from __future__ import annotations

import os
import posixpath
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ed_data.config.base import DataOptions
from ed_data.errors import DataError, KeyPath, did_you_mean


@dataclass(frozen=True)
class Kind:
    """A kind of source. A new kind needs one entry of `KINDS` and the module of its reader.

    Attributes:
        reader: `"module:name"` of a class or function that is called with the inform and the
            `FileCache` (or None) and returns an `ed_data.sources.Source`.
        suffixes: suffixes of files of this kind; empty if the source does not consist of files.
        aliases: other spellings of the name.
        label: maps `data_files` to the default name of an inform.
    """

    reader: str
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    label: Callable[[str], str] = str


#: The type of files of any format whose rows contain images.
VISUAL = "visual"
_FILES = "ed_data.sources.files:FileSource"
#: Kinds of sources by name, the `type` of an inform. A file format also needs an entry of
#: `ed_data.sources.formats.READERS`.
KINDS: dict[str, Kind] = {
    "json": Kind(_FILES, (".json", ".jsonl", ".ndjson"), ("jsonl",)),
    "parquet": Kind(_FILES, (".parquet",)),
    "csv": Kind(_FILES, (".csv",)),
    "tsv": Kind(_FILES, (".tsv",)),
    "txt": Kind(_FILES, (".txt", ".md"), ("text",)),
    "arrow": Kind(_FILES, (".arrow",)),
    "huggingface": Kind("ed_data.sources.hub:hub_source", aliases=("hf",)),
    "python": Kind(
        "ed_data.sources.python:PythonSource", label=lambda address: address.rpartition(":")[2]
    ),
}
#: The kinds that consist of files, and their suffixes.
FILE_TYPES = {name: kind.suffixes for name, kind in KINDS.items() if kind.suffixes}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def path_text(value: object) -> object:
    """Return a path object as a string, and other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _data_files(value: object) -> object:
    """Convert paths to strings, and raise one error for all types (pydantic has one for each)."""
    if isinstance(value, Mapping):
        by_split = {str(split): _data_files(files) for split, files in value.items()}
        if not any(isinstance(files, dict) for files in by_split.values()):
            return by_split
    elif isinstance(value, list | tuple):
        paths = [path_text(item) for item in value]
        if all(isinstance(item, str) for item in paths):
            return paths
    elif value is None or isinstance(value, str | os.PathLike):
        return path_text(value)
    raise ValueError(
        "data_files must be a path, a list of paths, or a mapping from splits, got "
        f"{reprlib.repr(value)}"
    )


def _function(value: object) -> object:
    if value is None or callable(value):
        return value
    if isinstance(value, str) and value.startswith("<"):
        raise ValueError(
            f"{value}: the record of a run cannot name such a function; define it in a file, and "
            "write 'path/file.py:function'"
        )
    if isinstance(value, str) and all(value.rpartition(":")):
        return value
    raise ValueError(
        "must be a function, or its name 'module:function' or 'path/file.py:function', got "
        f"{value!r}"
    )


DataFiles = Annotated[
    str | list[str] | dict[str, str | list[str]] | None, BeforeValidator(_data_files)
]
Function = Annotated[Callable[..., Any] | str | None, BeforeValidator(_function)]


class Inform(DataOptions):
    """One source of data.

    `type` is a file format (`json`, `parquet`, `csv`, `tsv`, `txt`, `arrow`; default: the format of
    the first file's suffix; a folder means its files of this format), `huggingface` with the
    id or the folder of a dataset in `data_files`, `python` with `data_files: "module:attribute"`,
    or the id of a dataset.

    A row is processed by `format_callback` (row to row; None drops the row) and `format_fields`
    (old name to new name). Then the value of `content_field` is processed by `preprocessing_fn`
    (content to content; None drops the row). In YAML, functions are names: `"module:function"` or
    `"path/file.py:function"`, with a path that is relative to the working directory.

    A row that cannot be read, formatted or encoded stops the run. With `on_error: skip` the row is
    dropped, counted and reported. A file that is damaged as a whole always stops the run.

    `type: visual` reads files whose rows have an image and a text: `image_field` names the path or
    the bytes of the image, or `pixel_field` its pixels, and `text_field` the text (an alias of
    `content_field`). A dataset of the hub is visual if `image_field` or `pixel_field` is set.

    Rows for models of speech have a recording in `audio_field` and a text, its transcript, in
    `content_field` (default: `text`, `sentence` or `transcription`). A recording is a path, bytes,
    `{path, bytes}`, or `{array, sampling_rate}`. It is never cut: the limits of durations drop
    rows, and a recording that is too long for the model is an error.

    A row has the fields that the method reads, or one of the published formats: `alpaca`
    (`instruction`, `input`, `output`), `sharegpt` (`conversations` with `from` and `value`),
    `llava` (the same, with `<image>` in the texts, and `image`), or `openai` (`messages`, or
    `preferred_output` and `non_preferred_output`). `format` names it; otherwise the fields of a row
    determine the format, and the log names it. `format_fields` is applied before.

    The content of a row is a text, a list of chat messages (`{"role": …, "content": …}`), or a
    list of token ids. Rows with chats may have the fields `tools` (a list of JSON schemas, or its
    JSON text) and `chat_template_kwargs` (a mapping), which are arguments of the chat template. The
    image parts of messages (`{"type": "image"}`) refer to the images in the field `images` or
    `image`, or in `image_field`, in order. The video parts (`{"type": "video"}`) refer to the
    videos in the field `videos` or `video`. The recording parts (`{"type": "audio"}`) refer to the
    recordings in the field `audios` or `audio`, or in `audio_field`.
    """

    type: str | None = None
    """A file format, `huggingface`, `python`, `visual`, or the id of a dataset."""
    data_files: DataFiles = None
    """Paths, globs, folders or addresses; or a mapping from splits to them."""
    name: str | None = None
    """Name in `mixture_weights` and statistics; default: the id, or the stem of the file name."""
    split: str = "train"
    """Name of the split."""
    dataset_split_name: str | None = None
    """Split or configuration of a Hugging Face dataset."""
    content_field: str = "content"
    """Field with the content of a row; for pairs, the prompt."""
    additional_fields: tuple[str, ...] = ()
    """Fields that saved documents and prompt batches contain in addition to the content."""
    image_field: str | None = None
    """Field with the path or the bytes of an image, or a list of images."""
    pixel_field: str | None = None
    """Field with the pixels of an image: numbers [height, width] or [height, width, channels]."""
    format: Literal["alpaca", "llava", "openai", "sharegpt"] | None = None
    """Published format of the rows; default: found by the fields of a row, unless the row has the
    fields that the method reads."""
    text_field: str | None = None
    """Alias of `content_field` in rows with images or recordings."""
    audio_field: str | None = None
    """Field with the recording of a row, or the recordings of a chat; default: `audio`."""
    max_duration_in_seconds: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Longest recording; longer ones are dropped and counted."""
    min_duration_in_seconds: Annotated[float, Field(ge=0, le=2**20)] = 0.0
    """Shortest recording; shorter ones are dropped and counted."""
    num_rows: Annotated[int, Field(gt=0, le=2**63 - 1)] | None = None
    """Maximum number of rows to read."""
    format_callback: Function = None
    """Function from row to row; None drops the row."""
    format_fields: dict[str, str] | None = None
    """Mapping from old to new names of fields."""
    preprocessing_fn: Function = None
    """Function from content to content; None drops the row."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """Unit of a text file that becomes a row."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether an invalid row stops the run or is dropped."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        try:
            kind, files, id_ = self.kind, self.data_files, self.dataset_id
        except DataError as error:
            yield error.path, str(error)
            return
        if kind == "huggingface" and not id_:
            yield (
                ("data_files",),
                "a Hugging Face dataset requires its id (or folder) in data_files",
            )
        elif kind != "huggingface" and not files:
            yield ("data_files",), f"type {kind!r} requires data_files"
        elif kind not in FILE_TYPES and not isinstance(files, str | None):
            yield ("data_files",), f"type {kind!r} requires one string in data_files"
        elif kind == "python" and ":" not in str(files):
            message = f"data_files of type python must be 'module:attribute', got {files!r}"
            yield ("data_files",), message
        yield from self._visual_problems()
        if kind != "huggingface" and self.dataset_split_name is not None:
            yield (
                ("dataset_split_name",),
                "dataset_split_name requires a Hugging Face dataset; for files write data_files: "
                "{train: …, validation: …} and set split",
            )
        if kind in FILE_TYPES and isinstance(files, dict) and self.split not in files:
            split_names, hint = ", ".join(files), did_you_mean(self.split, files)
            yield ("split",), f"split {self.split!r} is not in data_files ({split_names}){hint}"
        elif kind in FILE_TYPES and not isinstance(files, dict) and self.split != "train":
            yield (
                ("split",),
                f"files have only the split 'train', got {self.split!r}; write "
                f"data_files: {{{self.split}: …}} to name several splits",
            )
        if "sample_by" in self.model_fields_set and kind != "txt":
            yield ("sample_by",), f"sample_by requires type txt, got {kind!r}"
        for new, count in Counter((self.format_fields or {}).values()).items():
            if count > 1:
                message = f"{count} fields are renamed to {new!r}: the new names must be different"
                yield ("format_fields",), message

    def _visual_problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.image_field is not None and self.pixel_field is not None:
            yield (
                ("pixel_field",),
                "image_field and pixel_field exclude each other: remove one of them",
            )
        limits = self.min_duration_in_seconds, self.max_duration_in_seconds
        if limits[1] is not None and limits[0] > limits[1]:
            message = f"{limits[0]:g} exceeds max_duration_in_seconds ({limits[1]:g})"
            yield ("min_duration_in_seconds",), message
        if not self.is_visual:
            if self.text_field is not None and self.audio_field is None:
                message = (
                    "text_field requires visual rows or recordings: use content_field, or set "
                    "image_field or audio_field"
                )
                yield ("text_field",), message
        elif self.image_field is None and self.pixel_field is None:
            message = "visual rows require image_field (a path or bytes) or pixel_field (numbers)"
            yield ("image_field",), message
        if self.text_field is not None and "content_field" in self.model_fields_set:
            yield ("text_field",), "text_field is an alias of content_field: remove one of them"

    @property
    def is_visual(self) -> bool:
        """Whether each row has an image."""
        named = self.image_field is not None or self.pixel_field is not None
        return named or (self.type or "").lower() == VISUAL

    @property
    def kind(self) -> str:
        """The canonical type, a key of `KINDS`.

        Raises:
            DataError: the type, or the suffix of the first file, is unknown.
        """
        if self.type is not None and self.type.lower() != VISUAL:
            type_name, known_names = self.type.lower(), list[str]()
            for name, kind in KINDS.items():
                if type_name in (name, *kind.aliases):
                    return name
                known_names += [name, *kind.aliases]
            known_names.append(VISUAL)
            if "/" in self.type and self.data_files is None:
                return "huggingface"
            raise DataError(
                f"unknown type {self.type!r}{did_you_mean(type_name, known_names)} (known: "
                f"{', '.join(known_names)}; or a Hugging Face id 'organisation/name' without "
                "data_files)",
                ("type",),
            )
        if not self.files:
            message = "an inform requires data_files, or the id of a dataset as its type"
            raise DataError(message, ("data_files",))
        kind = type_of_path(self.files[0])
        if kind is None:
            raise DataError(
                f"the suffix of {self.files[0]!r} does not determine its type: set type "
                f"({', '.join(KINDS)})",
                ("data_files",),
            )
        return kind

    @property
    def files(self) -> list[str]:
        """`data_files` of the split as a list, with unresolved globs and addresses."""
        data_files = self.data_files
        if isinstance(data_files, dict):
            data_files = data_files.get(self.split, [])
        if data_files is None:
            return []
        return [data_files] if isinstance(data_files, str) else list(data_files)

    @property
    def dataset_id(self) -> str | None:
        """The id or folder of a Hugging Face dataset; None for other types."""
        if self.kind != "huggingface":
            return None
        if isinstance(self.data_files, str):
            return self.data_files
        return self.type if self.type and "/" in self.type else None

    @property
    def label(self) -> str:
        """The name of the inform: `name`, else the dataset id or file stem, else the split."""
        if self.name:
            return self.name
        kind = self.kind
        if kind not in FILE_TYPES:
            return KINDS[kind].label(str(self.dataset_id or self.data_files))
        stem = posixpath.basename(self.files[0].replace("\\", "/")) if self.files else ""
        stem = stem.split(".")[0]
        return self.split if not stem or any(c in stem for c in "*?[") else stem


def type_of_path(path: str) -> str | None:
    """Return the type of a path from its suffix (`"a/b.jsonl.gz"` → `"json"`), or None."""
    lower_path = path.lower()
    for suffix in COMPRESSIONS:
        lower_path = lower_path.removesuffix(suffix)
    return next((kind for kind, ends in FILE_TYPES.items() if lower_path.endswith(ends)), None)
