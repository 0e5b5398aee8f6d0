"""The options of data: informs (where it comes from), tokenization, mixture, saving.

Names and defaults are those of EasyDeL's YAML reference. Importing this module imports pydantic
and nothing heavier, so that a configuration can be checked in a moment.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from ed_data.errors import did_you_mean
from ed_data.options import Options

#: Readers of files, by `type`; the suffixes that mean them when `type` is not given.
FILE_TYPES: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "txt": (".txt", ".md"),
    "arrow": (".arrow",),
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_TYPE_ALIASES = {"jsonl": "json", "text": "txt", "hf": "huggingface"}
_KNOWN_TYPES = (*FILE_TYPES, *_TYPE_ALIASES, "huggingface", "python")


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _data_files(value: Any) -> Any:
    """Turn path objects into strings; say what is allowed once, not once per allowed type."""
    if isinstance(value, Mapping):
        found = {str(split): _data_files(files) for split, files in value.items()}
        if not any(isinstance(files, dict) for files in found.values()):
            return found
    elif isinstance(value, (list, tuple)):
        found = [_path(item) for item in value]
        if all(isinstance(item, str) for item in found):
            return found
    elif value is None or isinstance(value, (str, os.PathLike)):
        return _path(value)
    raise ValueError(f"data_files is a path, a list of paths, or these by split, not {value!r}")


def _function(value: Any) -> Any:
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
    """One source of documents.

    `type` is a reader of files (`json`, `parquet`, `csv`, `tsv`, `txt`, `arrow`; by default what
    the suffix of the first file says), `huggingface` with the dataset's id or folder in
    `data_files`, `python` with `data_files: "module:attribute"`, or a dataset's id itself.

    A row passes through `format_callback` (row to row, None drops it), `format_fields` (old name
    to new name), then `content_field` is taken, and `preprocessing_fn` (content to content, None
    drops it). The two functions may be given as `"module:function"`.

    The content of a row is a text, a list of chat messages (`{"role": …, "content": …}`), or a
    list of token ids.
    """

    type: str | None = None
    data_files: DataFiles = None
    name: str | None = None
    split: str = "train"
    dataset_split_name: str | None = None
    content_field: str = "content"
    additional_fields: tuple[str, ...] = ()
    num_rows: PositiveInt | None = None
    format_callback: Function = None
    format_fields: dict[str, str] | None = None
    preprocessing_fn: Function = None
    sample_by: Literal["line", "paragraph", "document"] = "line"

    @model_validator(mode="after")
    def _check(self) -> Inform:
        kind = self.kind
        if kind == "huggingface":
            if not self.dataset_id:
                raise ValueError("a Hugging Face dataset needs its id (or folder) in data_files")
        elif not self.data_files:
            raise ValueError(f"type {kind!r} needs data_files")
        elif self.dataset_split_name is not None:
            raise ValueError(
                "dataset_split_name is for Hugging Face datasets; for files give "
                "data_files: {train: …, validation: …} and choose with split"
            )
        if kind in FILE_TYPES:
            if isinstance(self.data_files, dict):
                if self.split not in self.data_files:
                    hint = did_you_mean(self.split, self.data_files)
                    raise ValueError(
                        f"split {self.split!r} is not in data_files "
                        f"({', '.join(self.data_files)}){hint}"
                    )
            elif self.split != "train":
                raise ValueError(
                    f"files have one split, 'train', not {self.split!r}; give "
                    f"data_files: {{{self.split}: …}} to name several"
                )
        elif not isinstance(self.data_files, (str, type(None))):
            raise ValueError(f"type {kind!r} takes one string in data_files")
        if kind == "python" and ":" not in str(self.data_files):
            raise ValueError(
                f"data_files of type python is 'module:attribute', not {self.data_files!r}"
            )
        if "sample_by" in self.model_fields_set and kind != "txt":
            raise ValueError(f"sample_by is for type txt, not {kind!r}")
        return self

    @property
    def kind(self) -> str:
        """The canonical type: a key of `FILE_TYPES`, `"huggingface"` or `"python"`."""
        if self.type is None:
            files = self.files
            if not files:
                raise ValueError("an inform needs data_files, or a dataset's id as its type")
            kind = type_of_path(files[0])
            if kind is None:
                raise ValueError(
                    f"cannot tell the type of {files[0]!r} from its suffix: set type "
                    f"({', '.join((*FILE_TYPES, 'huggingface', 'python'))})"
                )
            return kind
        name = self.type.lower()
        name = _TYPE_ALIASES.get(name, name)
        if name in FILE_TYPES or name in ("huggingface", "python"):
            return name
        if "/" in self.type and self.data_files is None:
            return "huggingface"
        hint = did_you_mean(name, _KNOWN_TYPES)
        raise ValueError(
            f"unknown type {self.type!r}{hint} (known: {', '.join(_KNOWN_TYPES)}; or a Hugging "
            "Face id 'organisation/name' without data_files)"
        )

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
        return self.data_files if isinstance(self.data_files, str) else self.type_as_id

    @property
    def type_as_id(self) -> str | None:
        """The type where it is a dataset's id (`type: organisation/name`)."""
        return self.type if self.type and "/" in self.type else None

    @property
    def label(self) -> str:
        """The name of this inform: `name`, else dataset id or file stem, else its split."""
        if self.name:
            return self.name
        kind = self.kind
        if kind == "huggingface":
            return str(self.dataset_id)
        if kind == "python":
            return str(self.data_files).rpartition(":")[2]
        stem = posixpath.basename(self.files[0].replace("\\", "/")) if self.files else ""
        stem = stem.split(".")[0]
        return self.split if not stem or any(c in stem for c in "*?[") else stem


def type_of_path(path: str) -> str | None:
    """Return the type that a path's suffix means, or None (`"a/b.jsonl.gz"` → `"json"`)."""
    plain = path.lower()
    for suffix in COMPRESSIONS:
        plain = plain.removesuffix(suffix)
    for kind, suffixes in FILE_TYPES.items():
        if plain.endswith(suffixes):
            return kind
    return None


def _padding(value: Any) -> Any:
    if value is True:
        return "longest"
    if value is False or value == "do_not_pad":
        raise ValueError("a batch is a rectangle, so rows are padded: 'max_length' or 'longest'")
    return value


class Tokenization(Options):
    """How a document becomes tokens.

    `max_length` cuts documents; without it, packing splits long documents over several rows and
    unpacked rows are cut at the sequence length. `truncation: true` cuts in packing too;
    `truncation: false` splits in both. An end-of-document token ends each document that was not
    cut. `assistant_only_loss` takes the loss of chat rows on what the chat template puts in
    `{% generation %}`.
    """

    tokenizer: str | None = None
    max_length: PositiveInt | None = None
    truncation: bool | None = None
    padding: Annotated[Literal["max_length", "longest"], BeforeValidator(_padding)] = "max_length"
    add_special_tokens: bool = True
    return_attention_mask: bool = False
    output_field: str = "input_ids"
    batch_size: PositiveInt = 1000
    assistant_only_loss: bool = False

    @model_validator(mode="after")
    def _check(self) -> Tokenization:
        if self.truncation is False and self.max_length is not None:
            raise ValueError("max_length cuts documents, and truncation: false forbids it")
        return self


class SaveOptions(Options):
    """Where and how to write the processed data (documents, or packed rows when packing)."""

    ALIASES: ClassVar[Mapping[str, str]] = {"output_path": "path"}

    path: Annotated[str, BeforeValidator(_path)]
    format: Literal["parquet", "json", "jsonl", "arrow"] = "parquet"
    num_shards: PositiveInt = 1
    compression: str | None = None
    overwrite: bool = False

    @model_validator(mode="after")
    def _check(self) -> SaveOptions:
        known = {
            "parquet": ("snappy", "gzip", "zstd", "lz4", "brotli", "none"),
            "arrow": ("zstd", "lz4"),
        }.get(self.format, ("gzip", "bz2", "xz"))
        if self.compression is not None and self.compression not in known:
            hint = did_you_mean(self.compression, known)
            raise ValueError(
                f"format {self.format} has no compression {self.compression!r}{hint} "
                f"(known: {', '.join(known)})"
            )
        return self


def _stop_strategy(value: Any) -> Any:
    return "all_exhausted" if value == "longest" else value


class Mixture(Options):
    """Informs, how they are mixed, split, tokenized and packed.

    Without `mixture_weights` an epoch holds each document once. With them, `stop_strategy` says
    how long an epoch is: as many documents as all informs have (`restart`), until the first inform
    has been read (`first_exhausted`), or until all have (`all_exhausted`, also `longest`).
    `block_mixture` keeps the proportions in every block of `mixture_block_size` documents.

    `shuffle_buffer_size` bounds how far a document moves (None: a full permutation; 0 or 1: none).
    `pack_shuffle` orders the packed rows randomly within buffers of
    `pack_shuffle_buffer_factor` batches. `pack_on_the_fly` tokenizes and packs when a batch needs
    it and writes nothing to disk.
    """

    informs: tuple[Inform, ...] = Field(min_length=1)
    eval_informs: tuple[Inform, ...] = ()
    eval_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)

    cache_dir: Annotated[str | None, BeforeValidator(_path)] = None
    cache_remote_files: bool = True
    text_target_field: str = "text"

    batch_size: PositiveInt | None = None
    seed: NonNegativeInt | None = None
    shuffle_buffer_size: NonNegativeInt | None = None

    pack_tokens: bool = False
    pack_seq_length: PositiveInt | None = None
    pack_eos_token_id: NonNegativeInt | None = None
    pack_strategy: Literal["bfd", "first_fit", "greedy", "wrapped"] = "bfd"
    pack_shuffle: bool = True
    pack_shuffle_buffer_factor: PositiveInt = 16
    pack_on_the_fly: bool = False

    block_mixture: bool = True
    mixture_block_size: PositiveInt = 2048
    stop_strategy: Annotated[
        Literal["restart", "first_exhausted", "all_exhausted"], BeforeValidator(_stop_strategy)
    ] = "restart"
    mixture_weights: dict[str, float] | None = None

    prefetch_workers: NonNegativeInt = 2
    prefetch_buffer_size: NonNegativeInt = 4

    tokenization: Tokenization = Tokenization()
    save: SaveOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Mixture:
        limit, length = self.tokenization.max_length, self.pack_seq_length
        if self.pack_tokens and limit is not None and length is not None and limit > length:
            raise ValueError(
                f"tokenization.max_length {limit} is above pack_seq_length {length}: no row could "
                "hold such a document; lower it, or leave it out to split long documents"
            )
        if self.pack_tokens and self.tokenization.padding == "longest":
            raise ValueError("packed rows all have pack_seq_length: padding 'longest' has no place")
        if self.mixture_weights is not None:
            self._check_weights(self.mixture_weights)
        return self

    def _check_weights(self, weights: dict[str, float]) -> None:
        labels = [inform.label for inform in self.informs]
        for name, weight in weights.items():
            if name not in labels:
                hint = did_you_mean(name, labels)
                raise ValueError(
                    f"mixture_weights: no inform is named {name!r}{hint} "
                    f"(the names are: {', '.join(labels)})"
                )
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"mixture_weights: the weight of {name!r} is {weight}; a weight is above 0 "
                    "(leave the inform out instead of giving it none)"
                )
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"mixture_weights: two informs are named {label!r}; give each its own name"
                )
            if label not in weights:
                raise ValueError(f"mixture_weights: inform {label!r} has no weight")
