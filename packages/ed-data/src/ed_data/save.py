"""Write processed data for other programs, or for use as an inform."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Protocol

import fsspec
import numpy as np

from ed_data.batches.arrays import NumpyBatch
from ed_data.config import Mixture, Saving
from ed_data.errors import DataError
from ed_data.rows.splits import choose_schema, default_cache_dir, file_cache, read_documents
from ed_data.rows.template import template_fields
from ed_data.schema import TEXT, Image, Row, Schema
from ed_data.sources.files import is_local
from ed_data.tokens.encoder import Encoder

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import PreTrainedTokenizerBase

_MARKER = ".ed_data.json"  # hidden, so that `datasets` ignores the file
_CHUNK = 1024  # rows that are converted to arrow at a time
_SUFFIX = {"parquet": ".parquet", "arrow": ".arrow", "json": ".jsonl", "jsonl": ".jsonl"}
_TEXT_SUFFIX = {"gzip": ".gz", "bz2": ".bz2", "xz": ".xz", None: ""}


class SavableLoader(Protocol):
    """A loader whose first epoch can be saved."""

    batch_size: int
    fingerprint: str

    @property
    def stats(self) -> dict[str, Any]: ...

    def batch_at(self, step: int) -> NumpyBatch: ...


def save_mixture(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    loader: SavableLoader | None = None,
    cache_dir: str | None = None,
    schema: Schema = TEXT,
) -> list[str]:
    """Write the training data to the location in `mixture.save`.

    With the loader of a mixture with packing, the rows of the first epoch are written. Otherwise
    the documents of all informs are written: the content under `text_target_field` (the fields of
    other schemas under their names), the `additional_fields`, the name of the inform under
    `source`, and, with a tokenizer, the tokens under `tokenization.output_field`.

    Returns:
        The paths of the files. If an earlier save of the same data exists, its files.

    Raises:
        DataError: there is no `save` section, or the folder contains other data and `overwrite` is
            off.
    """
    options = mixture.save
    if options is None:
        raise DataError("the location is missing: set mixture.save.path", ("save", "path"))
    packed = loader is not None and mixture.pack_tokens
    marker = {
        "rows": "packed" if packed else "documents",
        "fingerprint": None if loader is None else loader.fingerprint,
        "format": [
            options.format,
            options.num_shards,
            options.compression,
            options.max_shard_size,
        ],
    }
    fs, path = fsspec.core.url_to_fs(os.path.expanduser(options.path))
    if fs.exists(path):
        saved = _read_marker(fs, path)
        if loader is not None and saved.get("key") == marker:
            if options.push_to_hub and saved.get("pushed") != options.hub_repo_id:
                _push(path, saved, options)
            return [f"{path}/{name}" for name in saved["files"]]
        if not options.overwrite and (fs.isfile(path) or fs.ls(path, detail=False)):
            raise DataError(
                f"mixture.save.path: {options.path!r} exists and contains other data; choose "
                "another path, or set overwrite: true",
                ("save", "path"),
            )
    rows = (
        _packed_rows(loader)
        if packed and loader is not None
        else _document_rows(mixture, tokenizer, cache_dir or mixture.cache_dir, schema)
    )
    part = f"{path.rstrip('/')}.{uuid.uuid4().hex[:8]}.part"
    fs.makedirs(part, exist_ok=True)
    try:
        names = _write_shards(fs, part, rows, options)
        with fs.open(f"{part}/{_MARKER}", "w") as stream:
            json.dump({"key": marker, "files": names}, stream)
        _publish(fs, part, path, marker)
    finally:
        if fs.exists(part):
            fs.rm(part, recursive=True)
    if options.push_to_hub:
        _push(path, {"key": marker, "files": names}, options)
    return [f"{path}/{name}" for name in names]


def _push(path: str, marker: Row, options: Saving) -> None:
    """Upload a complete folder, and record the upload in its marker."""
    import huggingface_hub

    try:
        api = huggingface_hub.HfApi()
        repo = api.create_repo(
            str(options.hub_repo_id),
            repo_type="dataset",
            private=options.hub_private,
            exist_ok=True,
        ).repo_id
        api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=path,
            ignore_patterns=[_MARKER],
            delete_patterns=["train-*-of-*"],
            commit_message="Upload dataset",
        )
    except (OSError, ValueError) as error:  # HfHubHTTPError is an OSError
        raise DataError(
            f"mixture.save: {path!r} is complete, but cannot be pushed to {options.hub_repo_id!r}: "
            f"{error}; log in (hf auth login, or HF_TOKEN) and run again, or remove push_to_hub",
            ("save", "push_to_hub"),
        ) from error
    with open(os.path.join(path, _MARKER), "w", encoding="utf-8") as stream:
        json.dump({**marker, "pushed": options.hub_repo_id}, stream)


def _packed_rows(loader: SavableLoader) -> Iterator[Row]:
    remaining_rows = loader.stats["rows"]
    step = 0
    while remaining_rows > 0:
        batch = loader.batch_at(step)
        for index in range(min(remaining_rows, loader.batch_size)):
            yield {name: values[index].tolist() for name, values in batch.items()}
        remaining_rows -= loader.batch_size
        step += 1


def _document_rows(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: str | None,
    schema: Schema,
) -> Iterator[Row]:
    folder = file_cache(mixture, cache_dir or default_cache_dir())
    schema = choose_schema(mixture, schema, folder)
    options = mixture.tokenization
    encoder = None
    if tokenizer is not None:
        encoder = Encoder.create(tokenizer, options, mixture.pack_eos_token_id, schema)
    names = [f"{c.name}_{options.output_field}".lstrip("_") for c in schema.columns]
    for inform in mixture.informs:
        stream = read_documents(inform, folder, schema, mixture.media)
        while batch := list(islice(stream, options.batch_size)):
            tokens = iter(() if encoder is None else encoder.encode(batch, inform.label).tokens)
            for document in batch:
                fields = document.fields
                if schema.kind.is_text:
                    fields = {mixture.text_target_field: document.content}
                if document.image is not None:
                    fields = {
                        **fields,
                        mixture.image_target_field: _serialize_image(document.image),
                    }
                values = zip(schema.values, document.values, strict=True)
                fields = {**fields, **{v.field: value for v, value in values if not v.token_types}}
                template_values = template_fields(document.template)
                row = {**fields, **template_values, **document.extra, "source": inform.label}
                if encoder is not None:
                    row.update((name, next(tokens).tolist()) for name in names)
                yield row


def _serialize_image(image: Image | list[Image]) -> object:
    """Return an image, or a list of images, as a value of a table."""
    if isinstance(image, list):
        return [_serialize_image(single_image) for single_image in image]
    return image.tolist() if isinstance(image, np.ndarray) else image


def _write_shards(
    fs: fsspec.AbstractFileSystem, folder: str, rows: Iterable[Row], options: Saving
) -> list[str]:
    """Write rows to shards, a chunk at a time, so that no shard is kept in memory.

    Without a maximum size, chunks are distributed over the shards in turn. With a maximum size, the
    shards are written one after another.

    Returns:
        The names of the shards.
    """
    suffix, size = _SUFFIX[options.format], options.max_shard_size
    if suffix == ".jsonl":
        suffix += _TEXT_SUFFIX[options.compression]
    part_names: list[str] = []
    writers: list[_Writer] = []

    def open_next() -> None:
        part_names.append(f"{len(part_names):05d}{suffix}")
        writers.append(_Writer(fs, f"{folder}/{part_names[-1]}", options))

    stream = iter(rows)
    try:
        turn = 0
        single = options.num_shards == 1 or size is not None
        while chunk := list(islice(stream, _CHUNK if single else 64)):
            if size is not None:
                if writers and writers[-1].size >= size:
                    writers.pop().close()
                if not writers:
                    open_next()
            elif len(writers) < options.num_shards:
                open_next()
            writers[turn % len(writers)].write(chunk)
            turn += 1
    finally:
        for writer in writers:
            writer.close()
    names = [f"train-{n:05d}-of-{len(part_names):05d}{suffix}" for n in range(len(part_names))]
    for part_name, name in zip(part_names, names, strict=True):
        fs.mv(f"{folder}/{part_name}", f"{folder}/{name}")
    return names


class _Writer:
    """Writes one file, which is opened with its first rows."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str, options: Saving) -> None:
        self._fs, self._path, self._options = fs, path, options
        self._stream: Any = None
        self._table: pq.ParquetWriter | pa.RecordBatchFileWriter | None = None
        self._schema: pa.Schema | None = None

    @property
    def size(self) -> int:
        """Number of written bytes; for compressed texts, before compression."""
        return 0 if self._stream is None else self._stream.tell()

    def write(self, rows: list[Row]) -> None:
        if self._options.format in ("json", "jsonl"):
            if self._stream is None:
                compression = self._options.compression
                file = fsspec.core.OpenFile(
                    self._fs, self._path, "wt", compression=compression, encoding="utf-8"
                )
                self._stream = file.open()
            try:
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            except TypeError as error:
                raise DataError(
                    f"mixture.save: a row cannot be converted to JSON: {error}; use format parquet",
                    ("save", "format"),
                ) from error
            self._stream.writelines(lines)
            return
        import pyarrow as pa

        try:
            table = pa.Table.from_pylist(rows, schema=self._schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"mixture.save: the rows have no common type for {self._options.format}: {error}; "
                "use format json, or remove the field from additional_fields",
                ("save", "format"),
            ) from error
        added = set[str]().union(*rows) - {*table.schema.names}
        if added:
            raise DataError(
                f"mixture.save: a later row has the fields {', '.join(sorted(added))}, which the "
                f"first rows of the {self._options.format} file do not have; use format json, or "
                "add the fields to every row in format_callback",
                ("save", "format"),
            )
        if self._table is None:
            self._schema = table.schema
            self._stream = self._fs.open(self._path, "wb")
            self._table = self._open_table(self._stream, table.schema)
        self._table.write_table(table)

    def _open_table(
        self, stream: IO[bytes], schema: pa.Schema
    ) -> pq.ParquetWriter | pa.RecordBatchFileWriter:
        compression = self._options.compression
        if self._options.format == "parquet":
            import pyarrow.parquet as pq

            return pq.ParquetWriter(stream, schema, compression=compression or "snappy")
        import pyarrow as pa

        options = pa.ipc.IpcWriteOptions(compression=compression)
        return pa.ipc.new_file(stream, schema, options=options)

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
        if self._stream is not None:
            self._stream.close()


def _publish(fs: fsspec.AbstractFileSystem, part: str, path: str, marker: Row) -> None:
    """Rename the complete folder, unless another process published the same data."""
    if fs.exists(path):
        if marker["fingerprint"] and _read_marker(fs, path).get("key") == marker:
            return
        fs.rm(path, recursive=True)
    if not is_local(fs):
        fs.mv(part, path, recursive=True)
        return
    try:
        os.rename(part, path)  # fsspec would move the folder into an existing folder
    except OSError:
        if _read_marker(fs, path).get("key") != marker:
            raise


def _read_marker(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return the marker of a folder, empty if there is none."""
    try:
        with fs.open(f"{path}/{_MARKER}", "r") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return {}


def remove_cache(cache_dir: str | None = None) -> None:
    """Delete the caches of tokens, plans and remote files in a cache folder."""
    root = cache_dir or default_cache_dir()
    for name in ("tokens", "plans", "files"):
        shutil.rmtree(os.path.join(root, name), ignore_errors=True)
