"""Write processed data for other programs, or to be read again as an inform."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import fsspec

from ed_data.config import Mixture, SaveOptions
from ed_data.errors import DataError
from ed_data.prepare import default_cache_dir, open_options
from ed_data.sources import open_source
from ed_data.sources.files import is_local
from ed_data.tokenize import Encoder
from ed_data.transforms import documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ed_data.loader import Loader

Row = dict[str, Any]
_MARKER = "ed_data.json"
_CHUNK = 1024  # rows turned into arrow at a time
_SUFFIX = {"parquet": ".parquet", "arrow": ".arrow", "json": ".jsonl", "jsonl": ".jsonl"}
_TEXT_SUFFIX = {"gzip": ".gz", "bz2": ".bz2", "xz": ".xz", None: ""}


def save_mixture(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    loader: Loader | None = None,
    cache_dir: str | None = None,
) -> list[str]:
    """Write the training data as `mixture.save` says.

    With a loader of a mixture that packs: the rows of its first epoch, as trainers see them.
    Otherwise the documents of all informs: their content under `text_target_field`, the
    `additional_fields`, the inform's name under `source`, and, with a tokenizer, the tokens under
    `tokenization.output_field`.

    Returns:
        The paths of the files; of an earlier, equal save, if there is one.

    Raises:
        DataError: there is no `save` section, or the folder holds something else and `overwrite`
            is off.
    """
    options = mixture.save
    if options is None:
        raise DataError("nothing says where to save: set mixture.save.path")
    packed = loader is not None and mixture.pack_tokens
    marker = {
        "rows": "packed" if packed else "documents",
        "fingerprint": None if loader is None else loader.fingerprint,
        "format": [options.format, options.num_shards, options.compression],
    }
    fs, path = fsspec.core.url_to_fs(os.path.expanduser(options.path))
    if fs.exists(path):
        found = _read_marker(fs, path)
        if loader is not None and found is not None and found.get("key") == marker:
            return [f"{path}/{name}" for name in found["files"]]
        if not options.overwrite and (fs.isfile(path) or fs.ls(path, detail=False)):
            raise DataError(
                f"mixture.save.path: {options.path!r} exists and holds other data; choose another "
                "path, or set overwrite: true"
            )
    rows = (
        _packed_rows(loader)
        if packed and loader is not None
        else _document_rows(mixture, tokenizer, cache_dir or mixture.cache_dir)
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
    return [f"{path}/{name}" for name in names]


def _packed_rows(loader: Loader) -> Iterator[Row]:
    left = loader.stats["rows"]
    step = 0
    while left > 0:
        batch = loader.batch_at(step)
        for index in range(min(left, loader.batch_size)):
            yield {name: values[index].tolist() for name, values in batch.items()}
        left -= loader.batch_size
        step += 1


def _document_rows(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase | None, cache_dir: str | None
) -> Iterator[Row]:
    options = open_options(mixture, cache_dir or default_cache_dir())
    encoder = None
    if tokenizer is not None:
        encoder = Encoder.create(tokenizer, mixture.tokenization, mixture.pack_eos_token_id)
    for inform in mixture.informs:
        stream = documents(inform, open_source(inform, options))
        while batch := list(islice(stream, mixture.tokenization.batch_size)):
            tokens = None if encoder is None else encoder.encode(batch, inform.label)[0]
            for index, document in enumerate(batch):
                row = {mixture.text_target_field: document.content, **document.extra}
                row["source"] = inform.label
                if tokens is not None:
                    row[mixture.tokenization.output_field] = tokens[index].tolist()
                yield row


def _write_shards(fs: Any, folder: str, rows: Iterable[Row], options: SaveOptions) -> list[str]:
    """Deal rows to the shards in turn, a chunk at a time, so that no shard is held in memory."""
    suffix = _SUFFIX[options.format]
    if suffix == ".jsonl":
        suffix += _TEXT_SUFFIX[options.compression]
    names = [
        f"train-{number:05d}-of-{options.num_shards:05d}{suffix}"
        for number in range(options.num_shards)
    ]
    writers = [_Writer(fs, f"{folder}/{name}", options) for name in names]
    stream = iter(rows)
    try:
        turn = 0
        while chunk := list(islice(stream, _CHUNK if options.num_shards == 1 else 64)):
            writers[turn % len(writers)].write(chunk)
            turn += 1
    finally:
        for writer in writers:
            writer.close()
    for unused in names[turn:]:  # fewer rows than shards
        if fs.exists(f"{folder}/{unused}"):
            fs.rm(f"{folder}/{unused}")
    return names[:turn] if turn < len(names) else names


class _Writer:
    """One file of one of the formats, opened with its first rows."""

    def __init__(self, fs: Any, path: str, options: SaveOptions) -> None:
        self._fs, self._path, self._options = fs, path, options
        self._stream: Any = None
        self._table: Any = None
        self._schema: Any = None

    def write(self, rows: list[Row]) -> None:
        if self._options.format in ("json", "jsonl"):
            if self._stream is None:
                self._stream = fsspec.core.OpenFile(
                    self._fs,
                    self._path,
                    "wt",
                    compression=self._options.compression,
                    encoding="utf-8",
                ).open()
            self._stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            return
        import pyarrow as pa

        try:
            table = pa.Table.from_pylist(rows, schema=self._schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"mixture.save: the rows have no common type for {self._options.format}: {error}; "
                "use format json, or drop the field from additional_fields"
            ) from error
        if self._table is None:
            self._schema = table.schema
            self._stream = self._fs.open(self._path, "wb")
            self._table = self._open_table(table.schema)
        self._table.write_table(table)

    def _open_table(self, schema: Any) -> Any:
        compression = self._options.compression
        if self._options.format == "parquet":
            import pyarrow.parquet as pq

            return pq.ParquetWriter(self._stream, schema, compression=compression or "snappy")
        import pyarrow as pa

        return pa.ipc.new_file(
            self._stream, schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        )

    def close(self) -> None:
        if self._table is not None:
            self._table.close()
        if self._stream is not None:
            self._stream.close()


def _publish(fs: Any, part: str, path: str, marker: Row) -> None:
    """Put the finished folder where it belongs, unless an equal one came there meanwhile."""
    if fs.exists(path):
        found = _read_marker(fs, path)
        if marker["fingerprint"] and found is not None and found.get("key") == marker:
            return
        fs.rm(path, recursive=True)
    if not is_local(fs):
        fs.mv(part, path, recursive=True)
        return
    try:
        os.rename(part, path)  # fsspec would move it into a folder that is there
    except OSError:
        found = _read_marker(fs, path)
        if found is None or found.get("key") != marker:
            raise


def _read_marker(fs: Any, path: str) -> dict[str, Any] | None:
    try:
        with fs.open(f"{path}/{_MARKER}", "r") as stream:
            return json.load(stream)
    except (OSError, ValueError):
        return None


def remove_cache(cache_dir: str | None = None) -> None:
    """Delete the caches of tokens, plans and remote files under a cache folder."""
    root = cache_dir or default_cache_dir()
    for name in ("tokens", "plans", "files"):
        shutil.rmtree(os.path.join(root, name), ignore_errors=True)
