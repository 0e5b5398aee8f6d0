"""Hugging Face directories and hub repositories: where a model's files are, and a model from them.

`resolve` finds the files, `read_config` makes the configuration, `from_pretrained` the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.axes import PartitionAxis
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ed_models.generation_options import read_settings
from ed_models.loading import load
from ed_models.saving import Saved

#: Files of a repository that a model is made of; other copies of the weights stay where they are.
SETTINGS = ("*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
WEIGHTS = ("*.safetensors",)
_NEVER = ("*/*", "consolidated*", "*.bin", "*.pth")

ModuleT = TypeVar("ModuleT", bound=Saved)


class HubOptions(TypedDict, total=False):
    """Which files of the hub, and how to reach them: options of `huggingface_hub`."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


def resolve(
    name_or_path: str | Path,
    *,
    weights: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return a local directory with the files of a model, downloading them if need be.

    Args:
        name_or_path: a directory, or a hub repository (`"org/name"`).
        weights: fetch weights too, not only settings and tokenizer.
        revision, token, cache_dir, local_files_only, force_download: of the hub.

    Raises:
        CheckpointError: neither a directory nor a repository that can be reached.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.is_file() or path.is_absolute() or name.startswith((".", "~")):
        kind = "a file" if path.is_file() else "not there"
        raise CheckpointError(f"{name} is {kind}; give the directory that holds config.json")
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            allow_patterns=[*SETTINGS, *(WEIGHTS if weights else ())],
            ignore_patterns=list(_NEVER),
        )
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise CheckpointError(
            f"{name!r} is neither a directory here nor a repository on the hub that this token may "
            "read; check the spelling, or pass token="
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name!r} has no revision {revision!r} on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{name!r} is no directory here and not in the hub's local cache, and the hub cannot "
            "be asked (offline, or local_files_only); download it first, or give a directory"
        ) from error
    return Path(folder)


def read_config(directory: Path, **changes: object) -> EasyDeLBaseConfig:
    """Read config.json as the class that its model type names.

    Args:
        directory: a local directory.
        changes: fields to set instead of the file's values; unknown names are errors.

    Raises:
        CheckpointError: no readable config.json.
        RegistryError: nobody has registered its model type.
    """
    path = directory / "config.json"
    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no config.json, so it holds no model") from None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a JSON object ({error})") from error
    if not model_type:
        raise CheckpointError(f'{path} does not say its "model_type"')
    config = registry.get_config(model_type).from_pretrained(directory)
    return config.replace(**changes) if changes else config


def from_pretrained(
    name_or_path: str | Path,
    module_class: type[ModuleT] | None = None,
    task: TaskType | str = TaskType.CAUSAL_LM,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    precision: jax.lax.PrecisionLike = None,
    sharding_axis_dims: Sequence[int] = (1, -1, 1, 1, 1),
    sharding_dcn_axis_dims: Sequence[int] | None = None,
    sharding_axis_names: Sequence[str] | None = None,
    partition_axis: PartitionAxis | Mapping[str, object] | None = None,
    backend: str | None = None,
    platform: str | None = None,
    config_kwargs: Mapping[str, object] | None = None,
    auto_shard_model: bool = True,
    partition_rules: Sequence[tuple[str, PartitionSpec | Sequence[object]]] | None = None,
    **hub: Unpack[HubOptions],
) -> ModuleT:
    """Load a model in Hugging Face's layout straight onto its devices.

    Args:
        name_or_path: a directory or a hub repository.
        module_class: what to build; None = what the registry has for `task` and the model type.
        task: where `module_class` is None.
        dtype, param_dtype: of computation and of stored parameters, floating-point; the file's
            dtype does not matter, values are converted once.
        precision: of matrix products.
        sharding_axis_dims: devices along (dp, fsdp, ep, tp, sp); one -1 takes what remains.
        sharding_dcn_axis_dims, sharding_axis_names, partition_axis, backend, platform: execution
            fields of the configuration; None = the configuration's own.
        config_kwargs: further fields to change, such as `{"scan_layers": False}`.
        auto_shard_model: False puts every parameter whole on the mesh's first device.
        partition_rules: (regular expression, spec) pairs that override the derived sharding.
        hub: see `resolve`.

    Raises:
        CheckpointError: the files are not there, are damaged, or do not fit the model.
        ConfigError: a field is unknown or wrong, or the mesh does not fit the devices.
    """
    directory = resolve(name_or_path, **hub)
    changes = {
        "sharding_dcn_axis_dims": sharding_dcn_axis_dims,
        "sharding_axis_names": sharding_axis_names,
        "partition_axis": partition_axis,
        "backend": backend,
        "platform": platform,
        "sharding_rules": partition_rules,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    changes |= {"sharding_axis_dims": sharding_axis_dims} | dict(config_kwargs or {})
    config = read_config(directory, **changes)
    settings = read_settings(directory)
    module = load(
        cast("type[ModuleT]", module_class or registry.get_module(task, config.model_type)),
        config,
        directory,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        shard=auto_shard_model,
    )
    module.generation_json = settings
    return module
