"""Hugging Face datasets, from the hub or from a folder; `datasets` is imported on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from ed_data.config import Inform
from ed_data.errors import DataError, did_you_mean, listing

Row = dict[str, Any]


class HubSource:
    """A dataset of the hub, of the local hub cache, or one written by `save_to_disk`."""

    def __init__(self, inform: Inform) -> None:
        self._inform = inform
        self._data = _load(inform)
        self.fingerprint = f"huggingface:{self._data._fingerprint}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows in the order of the dataset."""
        data = self._data.with_format(None)
        if columns is not None and set(columns) <= set(data.column_names):
            data = data.select_columns(list(columns))
        yield from data


def _load(inform: Inform) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    where, label = str(inform.dataset_id), inform.label
    split = inform.split
    try:
        if os.path.isfile(os.path.join(where, "state.json")):
            return datasets.load_from_disk(where)
        if os.path.isfile(os.path.join(where, "dataset_dict.json")):
            splits = datasets.load_from_disk(where)
            return _choose(splits, inform.dataset_split_name or split, label)
        config = None
        if inform.dataset_split_name is not None:
            # The seeds use this key for a split, EasyDeL for a configuration: take what exists.
            if inform.dataset_split_name in datasets.get_dataset_config_names(where):
                config = inform.dataset_split_name
            else:
                split = inform.dataset_split_name
        return datasets.load_dataset(where, config, split=split)
    except DataError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"inform {label!r}: cannot load dataset {where!r}, split {split!r}: {error}"
        ) from error


def _choose(splits: Any, name: str, label: str) -> Any:
    if name not in splits:
        raise DataError(
            f"inform {label!r}: no split {name!r}{did_you_mean(name, splits)} "
            f"(the splits are: {listing(splits)})"
        )
    return splits[name]
