"""Hugging Face datasets, from the hub or from a folder; `datasets` is imported on first use.

Without `streaming`, `datasets` downloads and prepares a dataset once. With `streaming`, nothing is
stored: parquet files are read in place from any row group, and other formats through an
`IterableDataset`, shard by shard. (The state of an `IterableDataset` would not resume faster,
because it also reads the skipped tables of its shard.)
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from ed_data.config.source import Inform
from ed_data.errors import DataError, did_you_mean, listing
from ed_data.schema import Row
from ed_data.sources.features import row_decoder
from ed_data.sources.files import FileCache, FileSource
from ed_data.sources.formats import choose_columns
from ed_data.sources.lines import START, LineRecord, Spot

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, DatasetBuilder, IterableDataset

_ROWS = 1024  # rows of a table
_DECODED = 64  # rows of which each may contain an image
_ON_DISK = ("state.json", "dataset_dict.json")


def hub_source(
    inform: Inform, file_cache: FileCache | str | None = None
) -> HubSource | HubStream | FileSource:
    """Open a dataset.

    Raises:
        DataError: the dataset or the split does not exist.
    """
    dataset_id = str(inform.dataset_id)
    on_disk = any(os.path.isfile(os.path.join(dataset_id, name)) for name in _ON_DISK)
    if not isinstance(file_cache, FileCache) or on_disk:
        return HubSource(inform)
    # A few rows that are not cached do not justify downloading the whole dataset.
    few = file_cache.folder is None and inform.num_rows is not None
    if file_cache.streaming or few:
        return _stream(inform, dataset_id, file_cache)
    return HubSource(inform)


class HubSource:
    """A memory-mapped dataset of the local hub cache, or written by `save_to_disk`."""

    def __init__(self, inform: Inform) -> None:
        self._name = str(inform.dataset_id)
        self._data = _load(inform, self._name)
        self.fingerprint = f"huggingface:{self._data._fingerprint}"
        self.shards = [int(self._data.data.nbytes)]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows in the order of the dataset."""
        for record in self.records(0, columns):
            assert not isinstance(record.row, DataError)
            yield record.place, record.row

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[LineRecord]:
        """Yield the records starting at `start`; the source is one shard."""
        # In this format `datasets` decodes nothing: it would read any path or address that a row
        # names as an image, a recording, a video or a document.
        data = self._data.with_format("arrow")
        names = choose_columns(columns, data.column_names)
        if names is not None:
            data = data.select_columns(names)
        if start.row:
            data = data.select(range(min(start.row, len(data)), len(data)))
        index = start.row
        features: Any = self._data.features.to_dict()
        decode = row_decoder(features)
        for batch in data.iter(batch_size=_DECODED):
            for row in cast("pa.Table", batch).to_pylist():
                place = f"{self._name}, row {index}"
                yield LineRecord(place, decode(row), Spot(index), Spot(index + 1))
                index += 1

    def media_folders(self, shard: int) -> tuple[str, ...]:
        """Return the folders of the dataset and of its extracted archives."""
        return _media_folders(self._name)


def _media_folders(dataset_id: str) -> tuple[str, ...]:
    from datasets import config
    from huggingface_hub import constants

    extracted = str(config.EXTRACTED_DATASETS_PATH)
    if os.path.isdir(dataset_id):
        return os.path.abspath(dataset_id), extracted
    cache = os.path.join(constants.HF_HUB_CACHE, "datasets--" + dataset_id.replace("/", "--"))
    return f"hf://datasets/{dataset_id}", cache, extracted


class HubStream:
    """A dataset that is streamed shard by shard.

    Args:
        name: name of the dataset.
        data: the rows.
        version: a value that changes with the rows.
        size: total size in bytes, 0 if unknown.
    """

    def __init__(self, name: str, data: IterableDataset, version: str, size: int) -> None:
        self._name, self._data = name, data
        count = max(data.num_shards, 1)
        self.shards = [size // count] * count
        self.fingerprint = f"huggingface-stream:{version}:{count}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows of every shard."""
        for shard in range(len(self.shards)):
            for record in self.records(shard, columns):
                assert not isinstance(record.row, DataError)
                yield record.place, record.row

    def media_folders(self, shard: int) -> tuple[str, ...]:
        """Return the folders of the dataset and of its extracted archives."""
        return _media_folders(self._name)

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[LineRecord]:
        """Yield the records of one shard; tables before `start` are skipped without conversion."""
        data = self._data.shard(num_shards=len(self.shards), index=shard)
        row_offset = 0
        features: Any = {} if self._data.features is None else self._data.features.to_dict()
        decode = row_decoder(features)
        try:
            for batch in data.with_format("arrow").iter(batch_size=_ROWS):
                table = cast("pa.Table", batch)
                first = max(start.row - row_offset, 0)
                names = choose_columns(columns, table.column_names)
                if names is not None:
                    table = table.select(names)
                rows = table.slice(first).to_pylist() if first < table.num_rows else []
                for number, row in enumerate(rows, row_offset + first):
                    place = f"{self._name}, shard {shard}, row {number}"
                    yield LineRecord(place, decode(row), Spot(number), Spot(number + 1))
                row_offset += table.num_rows
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self._name}, shard {shard}: cannot be read after row {row_offset}: {error}"
            ) from error


def _stream(inform: Inform, dataset_id: str, cache: FileCache) -> HubStream | FileSource:
    import datasets
    from datasets.exceptions import DatasetsError
    from datasets.packaged_modules.parquet.parquet import Parquet

    label = inform.label
    config, split = _config_and_split(inform, dataset_id)
    try:
        builder = _open_builder(dataset_id, config, label)
        files = getattr(builder.config, "data_files", None) or {}
        if files and split not in files:
            raise DataError(_no_split(label, split, files))
        if isinstance(builder, Parquet) and not _reads_part(builder):
            file_options = {
                "type": "parquet",
                "name": label,
                "split": "train",
                "dataset_split_name": None,
            }
            return FileSource(inform.replace(**file_options, data_files=[*files[split]]), cache)
        data = builder.as_streaming_dataset(split=split)
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise _not_loaded(label, dataset_id, split, error) from error
    assert isinstance(data, datasets.IterableDataset)
    info = (builder.info.splits or {}).get(split)
    version = f"{dataset_id}:{config}:{split}:{builder.hash}"
    return HubStream(dataset_id, data, version, int(getattr(info, "num_bytes", 0) or 0))


def _open_builder(dataset_id: str, config: str | None, label: str) -> DatasetBuilder:
    """Return the builder of a dataset whose files are all in the dataset.

    The card of a dataset (README.md) may name data files, and `datasets` reads any path and any
    address.

    Raises:
        DataError: the card names a file outside of the dataset.
    """
    import datasets

    builder = datasets.load_dataset_builder(dataset_id, config)
    files = getattr(builder.config, "data_files", None) or {}
    root = os.path.realpath(dataset_id) if os.path.isdir(dataset_id) else None
    for file in (str(file) for paths in files.values() for file in paths):
        if root is not None:
            inside = os.path.realpath(file).startswith(root + os.sep) and "://" not in file
        else:
            inside = re.match(rf"hf://datasets/{re.escape(dataset_id)}(@[^/]+)?/(?!.*::)", file)
        if not inside:
            raise _outside(label, dataset_id, file)
    return builder


def _check_card(dataset_id: str, label: str) -> None:
    """Check the data files of a card, before `datasets` looks for them."""
    from datasets import config
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    cards = []
    if os.path.isdir(dataset_id):
        readme = os.path.join(dataset_id, config.REPOCARD_FILENAME)
        options = os.path.join(dataset_id, config.REPOYAML_FILENAME)
        if os.path.isfile(readme):
            cards.append(DatasetCard.load(readme))
        if os.path.isfile(options):
            with open(options, encoding="utf-8") as file:
                cards.append(DatasetCard(f"---\n{file.read()}\n---\n"))
    else:
        with contextlib.suppress(HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
            cards.append(DatasetCard.load(dataset_id))
    configs = [MetadataConfigs.from_dataset_card_data(card.data) for card in cards]
    for name in _texts([dict(card_config) for card_config in configs]):
        normal_name = posixpath.normpath(unquote(name.replace("\\", "/")))
        if "://" in name or "::" in name or normal_name.startswith(("/", "..", "~")):
            raise _outside(label, dataset_id, name)


def _texts(value: object) -> Iterator[str]:
    """Yield the paths in the `data_files` and `data_dir` of the configurations of a card."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("data_files", "data_dir", "path") or not isinstance(item, str):
                yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


def _outside(label: str, dataset_id: str, file: str) -> DataError:
    return DataError(
        f"inform {label!r}: the card of the dataset {dataset_id!r} names the data file "
        f"{file!r:.200}, "
        "which is not in the dataset: name the files that you trust in data_files"
    )


def _reads_part(builder: DatasetBuilder) -> bool:
    """Return whether the configuration of a parquet dataset selects columns or rows."""
    return any(getattr(builder.config, name, None) is not None for name in ("columns", "filters"))


def _config_and_split(inform: Inform, dataset_id: str) -> tuple[str | None, str]:
    """Return the configuration and the split that the options of an inform name.

    EasyDeL documents `dataset_split_name` as a split, but its code uses it as a configuration, so
    it is a configuration if one with this name exists.
    """
    import datasets

    _check_card(dataset_id, inform.label)
    name = inform.dataset_split_name
    if name is None:
        return None, inform.split
    if name in datasets.get_dataset_config_names(dataset_id):
        return name, inform.split
    return None, name


def _load(inform: Inform, dataset_id: str) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetsError

    label, split = inform.label, inform.split
    try:
        if os.path.isfile(os.path.join(dataset_id, "state.json")):
            return _one(datasets.load_from_disk(dataset_id), split, label)
        if os.path.isfile(os.path.join(dataset_id, "dataset_dict.json")):
            return _one(
                datasets.load_from_disk(dataset_id), inform.dataset_split_name or split, label
            )
        config, split = _config_and_split(inform, dataset_id)
        builder = _open_builder(dataset_id, config, label)
        builder.download_and_prepare()
        return _one(builder.as_dataset(split=split), split, label)
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise _not_loaded(label, dataset_id, split, error) from error


def _not_loaded(label: str, dataset_id: str, split: str, error: Exception) -> DataError:
    return DataError(
        f"inform {label!r}: cannot load dataset {dataset_id!r}, split {split!r}: {error}"
    )


def _no_split(label: str, split: str, splits: Iterable[object]) -> str:
    names = [str(name) for name in splits]
    return (
        f"inform {label!r}: there is no split {split!r}{did_you_mean(split, names)} "
        f"(the splits are: {listing(names)})"
    )


def _one(loaded: object, split: str, label: str) -> Dataset:
    """Return the dataset, or the named split of several."""
    import datasets

    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(_no_split(label, split, loaded))
        loaded = loaded[split]
    assert isinstance(loaded, datasets.Dataset)
    return loaded
