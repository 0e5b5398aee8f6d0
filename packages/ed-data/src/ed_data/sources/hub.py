"""Hugging Face datasets, from the hub or from a folder; `datasets` is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ed_data.errors import DataError, did_you_mean, listing
from ed_data.inform import Inform
from ed_data.schema import Row
from ed_data.sources.lines import START, Record, Spot

if TYPE_CHECKING:
    from datasets import Dataset


class HubSource:
    """A dataset of the hub, of the local hub cache, or one written by `save_to_disk`."""

    def __init__(self, inform: Inform, file_cache: object = None) -> None:
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
    ) -> Iterator[Record]:
        """Yield the records from one on: the only shard is the whole."""
        data = self._data.with_format(None)
        if columns is not None and set(columns) <= set(data.column_names):
            data = data.select_columns(list(columns))
        if start.row:
            data = data.select(range(min(start.row, len(data)), len(data)))
        for index, row in enumerate(data, start.row):
            yield Record(f"{self._name}, row {index}", dict(row), Spot(index), Spot(index + 1))


def _load(inform: Inform, where: str) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetsError

    label, split = inform.label, inform.split
    try:
        if os.path.isfile(os.path.join(where, "state.json")):
            return _one(datasets.load_from_disk(where), split, label)
        if os.path.isfile(os.path.join(where, "dataset_dict.json")):
            return _one(datasets.load_from_disk(where), inform.dataset_split_name or split, label)
        config = None
        if inform.dataset_split_name is not None:
            # EasyDeL's reference has this key for a split, its code for a configuration: take the
            # one that exists.
            if inform.dataset_split_name in datasets.get_dataset_config_names(where):
                config = inform.dataset_split_name
            else:
                split = inform.dataset_split_name
        return _one(datasets.load_dataset(where, config, split=split), split, label)
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"inform {label!r}: cannot load dataset {where!r}, split {split!r}: {error}"
        ) from error


def _one(loaded: object, split: str, label: str) -> Dataset:
    """The dataset, or the named split where several were loaded."""
    import datasets

    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"inform {label!r}: no split {split!r}{did_you_mean(split, loaded)} "
                f"(the splits are: {listing(loaded)})"
            )
        loaded = loaded[split]
    assert isinstance(loaded, datasets.Dataset)
    return loaded
