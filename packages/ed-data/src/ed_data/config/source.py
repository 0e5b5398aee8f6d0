"""One source of data: the kinds of sources there are, and the options of one (`Inform`)."""

from __future__ import annotations

import os
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ed_data.config.base import Options
from ed_data.errors import DataError, KeyPath, did_you_mean


@dataclass(frozen=True)
class Kind:
    """A kind of source. A new kind is one entry of `KINDS` and the file that it names.

    Attributes:
        reader: `"module:name"` of a class or function, called with the inform and how remote data
            are read (or None); the result is an `ed_data.sources.Source`.
        suffixes: the files that are of this kind; none where a source is not made of files.
        aliases: other spellings of its name.
        label: from `data_files` to the name of an inform that has none of its own.
    """

    reader: str
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    label: Callable[[str], str] = str


#: The type of files of any format whose rows have images.
VISUAL = "visual"
_FILES = "ed_data.sources.files:FileSource"
#: Kinds of sources by name, which is the `type` of an inform. A file format is also an entry of
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
#: The kinds that are made of files, and their suffixes.
FILE_TYPES = {name: kind.suffixes for name, kind in KINDS.items() if kind.suffixes}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def path_text(value: object) -> object:
    """Turn a path object into a string; anything else stays."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _data_files(value: object) -> object:
    """Turn path objects into strings. One message for all allowed types: pydantic has one each."""
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
    raise ValueError(f"data_files is a path, a list of paths, or these by split, not {value!r}")


def _function(value: object) -> object:
    if value is None or callable(value):
        return value
    if isinstance(value, str) and all(value.partition(":")):
        return value
    raise ValueError(f"a function, or its name as 'module:function', not {value!r}")


DataFiles = Annotated[
    str | list[str] | dict[str, str | list[str]] | None, BeforeValidator(_data_files)
]
Function = Annotated[Callable[..., Any] | str | None, BeforeValidator(_function)]


class Inform(Options):
    """One source of data.

    `type` is a reader of files (`json`, `parquet`, `csv`, `tsv`, `txt`, `arrow`; by default the one
    of the first file's suffix; a folder stands for its files of that type), `huggingface` with the
    dataset's id or folder in `data_files`, `python` with `data_files: "module:attribute"`, or a
    dataset's id itself.

    A row passes through `format_callback` (row to row, None drops it) and `format_fields` (old name
    to new name). Then its `content_field` is taken, and passes through `preprocessing_fn` (content
    to content, None drops the row). In YAML the two functions are `"module:function"`.

    A row that cannot be read, formatted or encoded stops the run; with `on_error: skip` it is left
    out, counted and reported. A file that is damaged as a whole always stops it.

    `type: visual` reads files whose rows have an image beside a text: `image_field` names its path
    or its bytes, or `pixel_field` its pixels, and `text_field` the text (another name of
    `content_field`). Of a dataset's id, one of the two fields says that it is visual.

    The content of a row is a text, a list of chat messages (`{"role": …, "content": …}`), or a
    list of token ids. Rows with chats may have the fields `tools` (a list of JSON schemas, or JSON
    text of it) and `chat_template_kwargs` (a mapping), which the chat template gets.
    """

    type: str | None = None
    """A reader, or the id of a dataset: see above."""
    data_files: DataFiles = None
    """Paths, globs, folders or addresses; or these by split."""
    name: str | None = None
    """For `mixture_weights` and figures; without it the id, or the file without its suffix."""
    split: str = "train"
    """Which of several splits."""
    dataset_split_name: str | None = None
    """The split, or else the configuration, of a Hugging Face dataset."""
    content_field: str = "content"
    """The field that is learned; of pairs, the prompt."""
    additional_fields: tuple[str, ...] = ()
    """Fields that are saved beside the content, and given with prompts."""
    image_field: str | None = None
    """The path or the bytes of an image."""
    pixel_field: str | None = None
    """The pixels of an image: numbers [height, width] or [height, width, channels]."""
    text_field: str | None = None
    """Another name of `content_field` in rows with images."""
    num_rows: Annotated[int, Field(gt=0, le=2**63 - 1)] | None = None
    """Rows that are read at most."""
    format_callback: Function = None
    """From row to row; None drops it."""
    format_fields: dict[str, str] | None = None
    """Old name of a field to its new one."""
    preprocessing_fn: Function = None
    """From content to content; None drops the row."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What a row of a text file is."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a row that cannot be read, or leave it out."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        try:
            kind, files, id_ = self.kind, self.data_files, self.dataset_id
        except DataError as error:
            yield error.path, str(error)
            return
        if kind == "huggingface" and not id_:
            yield ("data_files",), "a Hugging Face dataset needs its id (or folder) in data_files"
        elif kind != "huggingface" and not files:
            yield ("data_files",), f"type {kind!r} needs data_files"
        elif kind not in FILE_TYPES and not isinstance(files, str | None):
            yield ("data_files",), f"type {kind!r} takes one string in data_files"
        elif kind == "python" and ":" not in str(files):
            message = f"data_files of type python is 'module:attribute', not {files!r}"
            yield ("data_files",), message
        yield from self._visual_problems()
        if kind != "huggingface" and self.dataset_split_name is not None:
            yield (
                ("dataset_split_name",),
                "dataset_split_name is for Hugging Face datasets; for files write data_files: "
                "{train: …, validation: …} and choose with split",
            )
        if kind in FILE_TYPES and isinstance(files, dict) and self.split not in files:
            known, hint = ", ".join(files), did_you_mean(self.split, files)
            yield ("split",), f"split {self.split!r} is not in data_files ({known}){hint}"
        elif kind in FILE_TYPES and not isinstance(files, dict) and self.split != "train":
            yield (
                ("split",),
                f"files have one split, 'train', not {self.split!r}; write "
                f"data_files: {{{self.split}: …}} to name several",
            )
        if "sample_by" in self.model_fields_set and kind != "txt":
            yield ("sample_by",), f"sample_by is for type txt, not {kind!r}"
        for new, count in Counter((self.format_fields or {}).values()).items():
            if count > 1:
                message = f"{count} fields are renamed to {new!r}: one would hide the others"
                yield ("format_fields",), message

    def _visual_problems(self) -> Iterator[tuple[KeyPath, str]]:
        if self.image_field is not None and self.pixel_field is not None:
            yield ("pixel_field",), "a row has one image: keep image_field or pixel_field"
        if not self.is_visual:
            if self.text_field is not None:
                message = "text_field is for visual rows: write content_field, or set image_field"
                yield ("text_field",), message
        elif self.image_field is None and self.pixel_field is None:
            message = "visual rows need image_field (a path or bytes) or pixel_field (numbers)"
            yield ("image_field",), message
        if self.text_field is not None and "content_field" in self.model_fields_set:
            yield ("text_field",), "text_field is another name of content_field: keep one"

    @property
    def is_visual(self) -> bool:
        """Whether the rows have images."""
        named = self.image_field is not None or self.pixel_field is not None
        return named or (self.type or "").lower() == VISUAL

    @property
    def kind(self) -> str:
        """The canonical type: a key of `KINDS`.

        Raises:
            DataError: neither the type nor the suffix of the first file is known.
        """
        if self.type is not None and self.type.lower() != VISUAL:
            plain, known = self.type.lower(), list[str]()
            for name, kind in KINDS.items():
                if plain in (name, *kind.aliases):
                    return name
                known += [name, *kind.aliases]
            known.append(VISUAL)
            if "/" in self.type and self.data_files is None:
                return "huggingface"
            raise DataError(
                f"unknown type {self.type!r}{did_you_mean(plain, known)} (known: "
                f"{', '.join(known)}; or a Hugging Face id 'organisation/name' without data_files)",
                ("type",),
            )
        if not self.files:
            message = "an inform needs data_files, or a dataset's id as its type"
            raise DataError(message, ("data_files",))
        kind = type_of_path(self.files[0])
        if kind is None:
            raise DataError(
                f"cannot tell the type of {self.files[0]!r} from its suffix: set type, of a folder "
                f"too ({', '.join(KINDS)})",
                ("data_files",),
            )
        return kind

    @property
    def files(self) -> list[str]:
        """`data_files` of the chosen split as a list (globs and addresses not yet resolved)."""
        chosen = self.data_files
        if isinstance(chosen, dict):
            chosen = chosen.get(self.split, [])
        if chosen is None:
            return []
        return [chosen] if isinstance(chosen, str) else list(chosen)

    @property
    def dataset_id(self) -> str | None:
        """The Hugging Face id or folder, or None where the inform is not of that type."""
        if self.kind != "huggingface":
            return None
        if isinstance(self.data_files, str):
            return self.data_files
        return self.type if self.type and "/" in self.type else None

    @property
    def label(self) -> str:
        """The name of this inform: `name`, else dataset id or file stem, else its split."""
        if self.name:
            return self.name
        kind = self.kind
        if kind not in FILE_TYPES:
            return KINDS[kind].label(str(self.dataset_id or self.data_files))
        stem = posixpath.basename(self.files[0].replace("\\", "/")) if self.files else ""
        stem = stem.split(".")[0]
        return self.split if not stem or any(c in stem for c in "*?[") else stem


def type_of_path(path: str) -> str | None:
    """Return the type of a path by its suffix, or None (`"a/b.jsonl.gz"` → `"json"`)."""
    plain = path.lower()
    for suffix in COMPRESSIONS:
        plain = plain.removesuffix(suffix)
    return next((kind for kind, ends in FILE_TYPES.items() if plain.endswith(ends)), None)
