"""Setters of `eLargeModel`. Each setter changes sections and returns the object."""

from __future__ import annotations

import os
import pkgutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Self, TypeVar

from ed_infra.config.fields import FIELDS, canonical_field

from ed_elarge.errors import Document

SettersT = TypeVar("SettersT", bound="Setters")
#: The module that describes rows of Python; only calls with rows import it.
_GIVEN_ROWS = "ed_elarge.building.given_rows"


def _are_rows(value: object) -> bool:
    """Whether data are rows, and not paths, texts of paths, or paths of splits."""
    if isinstance(value, Mapping):
        return False
    if isinstance(value, list | tuple):
        return any(not isinstance(item, str | os.PathLike) for item in value)
    return value is not None and not isinstance(value, str | os.PathLike)


def _setter(section: str, leading: str = "") -> Callable[Concatenate[SettersT, ...], SettersT]:
    def set_section(self: SettersT, value: object = None, /, **keys: object) -> SettersT:
        first = {} if value is None else {leading: value}
        return self.update_config({section: {**keys, **first}})

    optional = f"; the positional argument is `{leading}`" if leading else ""
    set_section.__doc__ = f"Set keys of `{section}`{optional}."
    set_section.__name__ = f"set_{section}"
    return set_section


class Setters:
    """A method for each section, based on `update_config`."""

    _document: Document
    #: Keeps rows that Python code gave as long as this object is used.
    given_rows: tuple[object, ...] = ()

    @abstractmethod
    def update_config(self, config: Mapping[str, Any]) -> Self:
        """Merge sections into the configuration."""

    set_lora = _setter("lora")
    set_loader = _setter("loader")
    set_sharding = _setter("sharding")
    set_platform = _setter("platform")
    set_mixture = _setter("mixture")
    set_esurge = _setter("esurge")
    set_eval = _setter("eval")

    set_model = _setter("model", "name_or_path")
    set_reference_model = _setter("reference_model", "name_or_path")
    set_teacher_model = _setter("teacher_model", "name_or_path")
    set_reward_model = _setter("reward_model", "name_or_path")
    set_trainer = _setter("trainer", "trainer_type")

    def set_dtype(self, dtype: str, param_dtype: str | None = None) -> Self:
        """Set the dtype of computation and of the parameters (by default the same)."""
        return self.update_config({"loader": {"dtype": dtype, "param_dtype": param_dtype or dtype}})

    def set_base_config(self, **values: object) -> Self:
        """Override values of the model's configuration."""
        return self.update_config({"base_config": {"values": values}})

    def set_operation_configs(
        self, configs: Mapping[str, Mapping[str, Any]] | None = None, **values: object
    ) -> Self:
        """Set kernel settings of operations, and execution fields such as `attn_mechanism`.

        Args:
            configs: Operation -> settings, such as `{"flash_attn2": {"block_q": 128}}`.
            values: Operations with their settings, or execution fields with their values.
        """
        fields = {k: v for k, v in values.items() if canonical_field(k) in FIELDS}
        operations = {**(configs or {}), **{k: v for k, v in values.items() if k not in fields}}
        return self.update_config(
            {"base_config": {"values": fields, "operation_configs": operations}}
        )

    def add_dataset(
        self,
        data_files: object = None,
        dataset_type: str | None = None,
        content_field: str | None = None,
        split: str | None = None,
        *,
        dataset_name: str | None = None,
        max_length: int | None = None,
        held_out: bool = False,
        **inform: object,
    ) -> Self:
        """Add a source of texts to the mixture.

        Args:
            data_files: Files, globs, or another address that `dataset_type` reads. Or rows of this
                process: a list of mappings, a `datasets.Dataset` or `IterableDataset`, a frame of
                pandas or polars, or an arrow table.
            dataset_type: `json`, `parquet`, `csv`, `txt`, `huggingface`, `python`, …
            content_field: The field with the text.
            split: The split of the dataset.
            dataset_name: The id of a Hugging Face dataset, instead of `data_files`.
            max_length: The number of tokens at which texts of the mixture are truncated.
            held_out: Whether the source is used only for evaluation.
            inform: Further keys of an inform.
        """
        name = "eval_informs" if held_out else "informs"
        old_mixture = (self._document.value or {}).get("mixture") or {}
        old_informs = old_mixture.get(name) or ()
        mixture: dict[str, Any] = {}
        if dataset_name is not None:
            data_files, dataset_type = dataset_name, "huggingface"
        elif dataset_type is None and _are_rows(data_files):
            describe_rows = pkgutil.resolve_name(f"{_GIVEN_ROWS}:describe_rows")
            described, rows = describe_rows(data_files, f"{name}_{len(old_informs)}")
            self.given_rows = (*self.given_rows, rows)
            choose_streaming = pkgutil.resolve_name(f"{_GIVEN_ROWS}:choose_streaming")
            mixture |= choose_streaming([data_files], old_mixture)
            data_files, dataset_type = described.pop("data_files"), described.pop("type")
            inform = {**described, **inform}
        keys = {
            "type": dataset_type,
            "data_files": data_files,
            "content_field": content_field,
            "dataset_split_name" if dataset_name is not None else "split": split,
        }
        new = {**inform, **{key: value for key, value in keys.items() if value is not None}}
        mixture[name] = [*old_informs, new]
        if max_length is not None:
            mixture["tokenization"] = {"max_length": max_length}
        return self.update_config({"mixture": mixture})

    def set_quantization(
        self,
        method: str | None = None,
        group_size: int | None = None,
        *,
        kv_cache: str | Mapping[str, Any] | None = None,
        **quantization: Any,
    ) -> Self:
        """Set keys of `quantization`.

        Args:
            method: Format of the model's weights (`quantization.model.quantization_method`).
            group_size: Number of weights that share a scale.
            kv_cache: Format of the cache, or the keys of `quantization.kv_cache`.
            quantization: Further keys.
        """
        weights = {"quantization_method": method, "group_size": group_size}
        weights = {key: value for key, value in weights.items() if value is not None}
        if weights:
            quantization["model"] = {**quantization.get("model", {}), **weights}
        if kv_cache is not None:
            named = isinstance(kv_cache, str)
            quantization["kv_cache"] = {"quantization_method": kv_cache} if named else kv_cache
        return self.update_config({"quantization": quantization})
