"""Conversion of a configuration to dictionaries and files: reading and writing config.json."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any, Self

import fsspec
from transformers import PretrainedConfig

from ed_infra.config.fields import FIELDS, SECTION, ExecutionFields, canonical_field
from ed_infra.config.frozen import thaw
from ed_infra.config.subclass import known_names
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.logging import get_logger, once
from ed_infra.rope.parameters import check_parameters
from ed_infra.specs import to_json

logger = get_logger(__name__)

# Keys of older files whose values are now in rope_parameters.
_ROPE_NAMES = ("rope_scaling", "rope_theta", "partial_rotary_factor")

# Keywords of from_pretrained for access to the hub.
_HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "token", "revision")

#: Execution fields that EasyDeL writes beside the fields of an architecture.
_MARKS = {"easy_method", "attn_mechanism", "precompute_masks", "fcm_min_ratio", "partition_axis"}

#: Set during construction from a file, whose keys are not checked.
reading_file: contextvars.ContextVar[bool] = contextvars.ContextVar("reading_file", default=False)


class StoredConfig(ExecutionFields, PretrainedConfig):
    """Methods of `EasyDeLBaseConfig` for dictionaries and files."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, including execution fields, as JSON values."""
        data = super().to_dict()
        data.pop("_runtime", None)
        return {name: to_json(value) for name, value in data.items()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of config.json: Hugging Face's keys and execution fields.

        Nested configurations also contain only changed execution fields, in a section.
        """
        return _separate_fields(super().to_diff_dict(), self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Create a configuration from the keys of a file; keywords override them.

        Unknown keys of `config_dict` are kept; keywords are validated.

        Raises:
            ConfigError: A keyword is unknown, or a value is invalid.
        """
        unused_wanted = kwargs.pop("return_unused_kwargs", False)
        for name in ("_from_auto", "_from_pipeline"):
            kwargs.pop(name, None)
        data = _keys(config_dict)
        accepted_names = known_names(cls) | set(data)
        unused = {name: value for name, value in kwargs.items() if name not in accepted_names}
        if unused and not unused_wanted:
            name = next(iter(unused))
            raise ConfigError(
                f"{cls.__name__} has no field {name!r}{did_you_mean(name, accepted_names)}"
            )
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(kwargs.get(name), Mapping):
                extra = cls.ignore_keys_at_rope_validation
                check_parameters(kwargs[name], names=True, known_names=extra)
        _merge(cls, data, {k: v for k, v in kwargs.items() if k not in unused})
        computed = _pop_computed(cls, data)
        token = reading_file.set(True)
        try:
            config = cls(**data)
        finally:
            reading_file.reset(token)
        for name, value in computed.items():
            if value is not None and value != (computed_value := getattr(config, name)):
                raise ConfigError(
                    f"{name} = {value!r} contradicts the other fields, from which {cls.__name__} "
                    f"computes {computed_value!r}: omit it"
                )
        return (config, unused) if unused_wanted else config

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read config.json from a directory, the hub, or an fsspec address (`gs://bucket/model`).

        Returns:
            The keys of the file, and the keywords that do not control reading.
        """
        address, kwargs = str(pretrained_model_name_or_path), _hub_keywords(kwargs)
        if "://" in address:
            data, kwargs = _read_remote(address, kwargs)
        else:
            data, kwargs = super().get_config_dict(address, **kwargs)
        return accept_easydel_values(data, address), kwargs

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write config.json to a directory or an fsspec address (`gs://bucket/model`).

        Raises:
            ConfigError: A keyword has no effect, or an address cannot be uploaded to the hub.
        """
        address = str(save_directory)
        accepted_keywords = {*inspect.signature(super().push_to_hub).parameters, "repo_id", "token"}
        for name in kwargs:
            if name not in accepted_keywords:
                hint = did_you_mean(name, accepted_keywords)
                raise ConfigError(f"save_pretrained has no keyword {name!r}{hint}")
            if not push_to_hub:
                raise ConfigError(f"{name} has no effect without push_to_hub=True: omit it")
        if "://" not in address:
            super().save_pretrained(address, push_to_hub, **kwargs)
        elif push_to_hub:
            raise ConfigError(f"push_to_hub needs a local directory, not {address!r}")
        else:
            _write(f"{address.rstrip('/')}/config.json", self.to_json_string())

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """Write a JSON file to a path or an fsspec address.

        Args:
            json_file_path: The path or address.
            use_diff: Whether to omit values that equal their defaults.
        """
        _write(str(json_file_path), self.to_json_string(use_diff=use_diff))

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Self:
        """Create a configuration from a JSON file."""
        return cls.from_dict(cls._dict_from_json_file(json_file))


def accept_easydel_values(stored: dict[str, Any], location: str) -> dict[str, Any]:
    """Return the content of a config.json; values that only EasyDeL writes are converted.

    Args:
        stored: The content of the file.
        location: Path or address of the file.
    """
    texts = (value for value in stored.values() if isinstance(value, Mapping))
    # This project writes its execution fields in a section, and transformers has no such fields.
    if not any(_MARKS & keys.keys() for keys in (stored, *texts)):
        return stored
    from ed_infra.config.easydel_values import convert_easydel_values

    return convert_easydel_values(stored, location)


def _keys(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file, merged with the section of this project.

    Raises:
        ConfigError: The section has a key that is no execution field.
    """
    data = dict(config_dict)
    section = dict(data.pop(SECTION, None) or {})
    for name in section:
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS)
            raise ConfigError(f"config.json: unknown key {name!r} in {SECTION!r}{hint}")
    data.update(section)
    data.pop("model_type", None)
    # Files of transformers before 4.11 store a switch of the training run under this name.
    if isinstance(data.get("gradient_checkpointing"), bool):
        del data["gradient_checkpointing"]
    return data


def _separate_fields(diff: Mapping[str, Any], config: object) -> dict[str, Any]:
    """Return the keys, with changed execution fields in the section of this project.

    Args:
        diff: Keys of a configuration.
        config: The configuration.
    """
    data = {name: to_json(value) for name, value in diff.items()}
    for name, value in data.items():
        nested = vars(config).get(name)
        if isinstance(nested, StoredConfig) and isinstance(value, dict):
            data[name] = _separate_fields(value, nested)
    section = {}
    for name, field in FIELDS.items():
        value = data.pop(name, None)
        if name == "quantization_config" and isinstance(value, dict) and "quant_method" in value:
            data[name] = value  # of the checkpoint, and read by transformers
        elif value != to_json(field.default):
            section[name] = value
    if section:
        data[SECTION] = section
    return data


def _read_remote(address: str, keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read config.json from an fsspec address, of the file or of its directory.

    Returns:
        The keys of the file, and the keywords that are not about reading it.
    """
    keywords = {name: value for name, value in keywords.items() if name not in _HUB_KEYWORDS}
    folder = keywords.pop("subfolder", None)
    if not address.endswith(".json"):
        parts = [address.rstrip("/"), *([folder.strip("/")] if folder else []), "config.json"]
        address = "/".join(parts)
    with fsspec.open(address, "rt") as file:
        return json.load(file), keywords  # type: ignore[arg-type]


def _write(address: str, text: str) -> None:
    """Write a text file, to a path or an fsspec address."""
    with fsspec.open(address, "wt", encoding="utf-8") as file:
        file.write(text)  # type: ignore[attr-defined]


def _hub_keywords(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of `from_pretrained` without two that huggingface_hub no longer has.

    Raises:
        ConfigError: `proxies` is set.
    """
    keywords = dict(keywords)
    if keywords.pop("proxies", None) is not None:
        raise ConfigError(
            "proxies is not a keyword of huggingface_hub any more: set the environment "
            "variables HTTP_PROXY and HTTPS_PROXY"
        )
    if keywords.pop("resume_download", None) is not None:
        once(logger, "resume_download has no effect: downloads are always resumed")
    return keywords


def _pop_computed(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the values that a class computes from others, such as Falcon's head_dim."""
    properties = {name: getattr(cls, name, None) for name in data}
    return {
        name: data.pop(name)
        for name, value in properties.items()
        if isinstance(value, property) and value.fset is None
    }


def _merge(cls: type, data: dict[str, Any], changes: dict[str, Any]) -> None:
    """Override the keys of a file; both may contain old and new spellings of a field."""
    attributes = getattr(cls, "attribute_map", {})
    declared = {field.name for field in dataclasses.fields(cls)}
    rope = {n: changes[n] for n in _ROPE_NAMES if n in changes and n not in declared}
    for name, value in changes.items():
        if name not in rope:
            data.pop(name, None)
            field = canonical_field(name)
            data[attributes.get(field, field)] = value
    if not rope:
        return
    parameters = data.pop("rope_parameters", None) or data.pop("rope_scaling", None) or {}
    parameters = thaw(dict(parameters))
    data.pop("rope_scaling", None)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in declared and name in data:
            parameters.setdefault(name, data.pop(name))
    if "rope_scaling" in rope:
        file_parameters = {n: parameters[n] for n in ("rope_theta",) if n in parameters}
        parameters = {**file_parameters, **(rope.pop("rope_scaling") or {})}
    # One entry for each layer type: a new base applies to all entries.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for target in nested or [parameters]:
        target.update(rope)
    data["rope_parameters"] = parameters
