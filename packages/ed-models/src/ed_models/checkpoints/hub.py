"""Hugging Face directories and hub repositories: where a model's files are, and a model from them.

`resolve` finds the files, `read_config` makes the configuration, `from_pretrained` the model.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.fields import FIELD_ALIASES, FIELDS
from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import (
    CheckpointError,
    ConfigError,
    RegistryError,
    describe_missing_path,
    did_you_mean,
    refuse_keywords,
)
from ed_infra.package_files import RUN_FOLDERS, find_package_file, is_package_address
from ed_infra.sharding import placement
from ed_infra.sharding.axes import PartitionAxis
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.model import QuantizationRules, to_spec, warn_of_plain_weights
from flax import nnx
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

from ed_models.checkpoints.carried import CarriedTensors
from ed_models.checkpoints.checks import (
    MODULES_NAME,
    check_config,
    check_tokenizer,
    detect_task,
    read_checkpoint_settings,
    read_cross_encoder,
)
from ed_models.checkpoints.gguf.directory import ENDING as GGUF
from ed_models.checkpoints.gguf.directory import (
    as_directory,
    file_in,
    find_weights_file,
    parts_pattern,
)
from ed_models.checkpoints.loading import CheckedFiles, load_module, prepare_module
from ed_models.checkpoints.orbax_arrays import find_orbax_item
from ed_models.checkpoints.pickled_files import PICKLED, open_tensors
from ed_models.checkpoints.tensor_files import EASYDEL_INDEX
from ed_models.checkpoints.text_halves import MODEL_TYPES

#: Files of a repository that are downloaded; other copies of the weights are not.
_SETTINGS = (
    *("*.json", "*.jinja", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.py"),
    *("README.md", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)
_WEIGHTS = ("*.safetensors",)
#: Settings of the modules of sentence-transformers.
_MODULES = ("*_Pooling/config.json", "*_Dense/config.json")
#: The vocabulary of a model of CTranslate2, whose settings are those of its weights.
_VOCABULARIES = "vocabulary.*"
_NEVER = ("*/*", "consolidated*", "*.bin", "*.pth")


class Loadable(Protocol):
    """A module class, as far as loading goes."""

    config: EasyDeLBaseConfig

    @classmethod
    def read_settings(
        cls, directory: Path, *, allow_pickle: bool = False, check_finite: bool = True
    ) -> dict[str, object]:
        """The settings of a module in the files other than config.json and the weights."""
        ...


LoadableT = TypeVar("LoadableT", bound=Loadable)
_ModuleT = TypeVar("_ModuleT", bound=nnx.Module)


class HubOptions(TypedDict, total=False):
    """Which files of the hub, and how to reach them: options of `huggingface_hub`."""

    gguf_file: str | None
    revision: str | None
    subfolder: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool
    force_download: bool


def resolve(
    name_or_path: str | Path,
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return a local directory with the files of a model, downloading them if need be.

    For a GGUF file, and a Whisper of CTranslate2, the directory contains the settings and the
    tokenizer in Hugging Face layout (`ed_models.checkpoints.gguf.directory`).

    Args:
        name_or_path: a directory, a hub repository (`"org/name"`), a GGUF file, or a GGUF file in
            a repository (`"org/name/model.gguf"`), or any of them in an installed package
            (`"package:NAME/PATH"`, see `ed_infra.package_files`).
        gguf_file: name of a GGUF file in the directory or repository. Of a model in several files,
            the first one.
        weights: fetch weights too, not only settings and tokenizer.
        allow_pickle: fetch `pytorch_model.bin` where the repository has no safetensors files.
        subfolder: where the model is in the directory or repository, if not at the top.
        revision, token, cache_dir, local_files_only, force_download: of the hub.

    Raises:
        CheckpointError: neither a directory nor a repository that can be reached.
    """
    if is_package_address(name_or_path):
        name_or_path = find_package_file(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        folder = _within(path, subfolder)
        file = file_in(folder, gguf_file)
        return _find_model_folder(folder) if file is None else as_directory(file)
    name = str(name_or_path)
    if path.is_file() and path.name.endswith(GGUF):
        return as_directory(path)
    if gguf_file is None and name.endswith(GGUF) and name.count("/") > 1 and not path.is_absolute():
        owner, repository, gguf_file = name.split("/", 2)
        name = f"{owner}/{repository}"
    if path.is_file() or path.is_absolute() or name.startswith((".", "~")):
        kind = "a file" if path.is_file() else "not there"
        raise CheckpointError(
            f"{name} is {kind}; give the directory that holds config.json"
            f"{describe_missing_path(name)}"
        )
    under = f"{subfolder.strip('/')}/" if subfolder else ""

    def fetch(patterns: Sequence[str], never: Sequence[str]) -> Path:
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            allow_patterns=[under + pattern for pattern in patterns],
            ignore_patterns=[under + pattern for pattern in never],
        )
        return _within(Path(folder), subfolder)

    try:
        if gguf_file is not None:
            folder = fetch([parts_pattern(gguf_file)], [])
            return as_directory(file_in(folder, gguf_file) or folder)
        folder = fetch([*_SETTINGS, *(_WEIGHTS if weights else ())], _NEVER)
        if (folder / MODULES_NAME).is_file():
            pickled = (PICKLED,) if allow_pickle else ()
            dense = [f"*_Dense/{name}" for name in (*_WEIGHTS, *pickled)] if weights else []
            fetch([*_MODULES, *dense], [])
        if weights and allow_pickle and not any(folder.glob("*.safetensors")):
            fetch([f"{Path(PICKLED).stem}*.bin"], ["*/*"])
        if weights and (folder / EASYDEL_INDEX).is_file():
            fetch(["model/*"], [])
        if any(folder.glob(_VOCABULARIES)):
            fetch(["model.bin"], ["*/*"])
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise CheckpointError(
            f"{name!r} is neither a directory here nor a repository on the hub that this token may "
            f"read; check the spelling, or pass token={describe_missing_path(name)}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{name!r} has no revision {revision!r} on the hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{name!r} is no directory here and not in the hub's local cache, and the hub cannot "
            "be reached (offline, or local_files_only); download it first, or pass a directory"
            f"{describe_missing_path(name)}"
        ) from error
    return _as_hugging_face(folder)


def _find_model_folder(folder: Path) -> Path:
    """Return a folder, the model in the folder of a run, or the newest of EasyDeL's runs in it."""
    if (folder / "config.json").is_file():
        return _as_hugging_face(folder)
    if (folder / RUN_FOLDERS[0] / "config.json").is_file():
        return folder / RUN_FOLDERS[0]
    from ed_models.checkpoints.easydel_folder import find_newest_run

    return find_newest_run(_as_hugging_face(folder))


def _as_hugging_face(folder: Path) -> Path:
    """Return a folder; of a folder of CTranslate2, MaxText or tunix, a directory with its
    settings."""
    item = None if any(folder.glob("*.safetensors")) else find_orbax_item(folder)
    if item is not None:
        from ed_models.checkpoints.maxtext_folder import write_maxtext_settings

        return write_maxtext_settings(item)
    if not any(folder.glob(_VOCABULARIES)):
        return folder
    from ed_models.checkpoints.ctranslate2_folder import (
        is_ctranslate2_folder,
        write_ctranslate2_settings,
    )

    return write_ctranslate2_settings(folder) if is_ctranslate2_folder(folder) else folder


def _within(folder: Path, subfolder: str | None) -> Path:
    if not subfolder:
        return folder
    inner = folder / subfolder
    if not inner.is_dir():
        there = sorted(p.name for p in folder.iterdir() if p.is_dir())
        raise CheckpointError(
            f"{folder} has no subfolder {subfolder!r}{did_you_mean(subfolder, there)} "
            f"(there are: {', '.join(there) or 'none'})"
        )
    return inner


def read_config(
    directory: Path, task: TaskType | None = None, **changes: object
) -> EasyDeLBaseConfig:
    """Read config.json as the class of its model type.

    Args:
        directory: a local directory.
        task: task of the model, which determines whether a multimodal checkpoint is loaded whole or
            as its text half; None = the task that `architectures` names.
        changes: fields to set instead of the file's values; unknown names are errors.

    Raises:
        CheckpointError: no readable config.json, or one that contradicts itself.
        RegistryError: its model type is not registered.
        ConfigError: a change is unknown or wrong.
    """
    path = directory / "config.json"
    stored = read_checkpoint_settings(path, task)
    pair_settings = read_cross_encoder(directory)
    if pair_settings is not None and pair_settings.get("activation_fn"):
        activation = {"activation_fn": pair_settings["activation_fn"]}
        stored = {**stored, "sentence_transformers": activation}
    model_type = stored.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f'{path} has no "model_type"')
    if "text_config" in stored and model_type not in registry.model_types():
        raise RegistryError(
            f"{path} has model_type={model_type!r}, a multimodal model that is not registered. The "
            f"text model is loaded from these multimodal models: {', '.join(sorted(MODEL_TYPES))}"
        )
    cls = registry.get_config(model_type)
    try:
        config = cls.from_dict(stored)
    except (ConfigError, ArithmeticError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} describes no model: {error}") from error
    check_config(path, stored, config)
    return config.replace(**changes) if changes else config


def from_pretrained(
    name_or_path: str | Path,
    module_class: type[LoadableT] | None = None,
    task: TaskType | str = TaskType.CAUSAL_LM,
    *,
    variant: str | None = None,
    allow_pickle: bool = False,
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
    quantization_config: QuantizationRules | None = None,
    apply_quantization: bool | None = None,
    check_finite: bool = True,
    truncate_dim: int | None = None,
    **hub: Unpack[HubOptions],
) -> LoadableT:
    """Load a model in Hugging Face's layout straight onto its devices.

    A folder that EasyDeL, MaxText or tunix saved is read, too
    (`ed_models.checkpoints.easydel_folder`, `ed_models.checkpoints.maxtext_folder`).

    Args:
        name_or_path: a directory or a hub repository.
        module_class: the class to build; None = the registered class of `task` and the model type.
        task: where `module_class` is None; "auto-bind" uses the task of the checkpoint, which the
        class
            in its `architectures` names.
        variant: of the weights: "fp16" reads `model.fp16.safetensors`.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors files. No code of the
            file is run: whatever is not a tensor is refused.
        dtype, param_dtype: of computation and of stored parameters, floating-point; the file's
            dtype does not matter, values are converted once.
        precision: of matrix products.
        sharding_axis_dims: devices along (dp, fsdp, ep, tp, sp); one -1 = all remaining devices.
        sharding_dcn_axis_dims, sharding_axis_names, partition_axis, backend, platform: execution
            fields of the configuration; None = the configuration's own.
        config_kwargs: further fields to change, such as `{"scan_layers": False}`.
        auto_shard_model: False puts every parameter whole on the mesh's first device.
        partition_rules: (regular expression, spec) pairs that override the derived sharding.
        quantization_config: the argument of the model's `quantize`, such as `{"dtype": "nf4"}`.
        apply_quantization: quantize each matrix as it is read, so that the model is never whole in
            memory unquantized; by the checkpoint's own configuration where `quantization_config`
            is None. False keeps `quantization_config` in the model's configuration, for
            `model.quantize()`. None: False, with a warning if there is a configuration.
        check_finite: refuse weights with NaN or infinite numbers; the error names the tensor. False
            loads such weights unchanged.
        truncate_dim: number of elements of the vectors of an embedding model (Matryoshka); None =
            the number in the checkpoint, or all elements.
        hub: see `resolve`; also `num_labels`, `id2label`, `label2id` and `problem_type`, fields of
            the configuration that `config_kwargs` sets, too.

    Raises:
        CheckpointError: the files are not there, are damaged, or do not fit the model.
        ConfigError: a field is unknown or wrong, the mesh does not fit the devices, or there is
            nothing to quantize by.
    """
    labels, hub = _split_labels(drop_redundant_keywords(hub))
    check_loading_keywords(hub)
    directory = resolve(name_or_path, allow_pickle=allow_pickle, **hub)
    changes = {
        "sharding_dcn_axis_dims": sharding_dcn_axis_dims,
        "sharding_axis_names": sharding_axis_names,
        "partition_axis": partition_axis,
        "backend": backend,
        "platform": platform,
        "sharding_rules": partition_rules,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    changes |= {"sharding_axis_dims": sharding_axis_dims} | labels | dict(config_kwargs or {})
    model_task = canonical_task(task) if module_class is None else None
    model_task = getattr(module_class, "model_task", model_task)
    config = read_config(directory, model_task, **changes)
    config = _for_task(config, module_class, task, directory)
    # Adapters and model cards state their base, and its revision.
    config._commit_hash = hub.get("revision")
    local = Path(name_or_path).expanduser()
    if local.exists():
        folder = directory if find_weights_file(directory) is None else local
        config.name_or_path = str(folder.resolve())
    else:
        config.name_or_path = str(name_or_path)
    check_tokenizer(directory, getattr(config, "vocab_size", None))
    cls = _class_for(module_class, task, config, directory)
    if truncate_dim is not None and not hasattr(cls, "truncate_embeddings"):
        raise ConfigError(
            f"truncate_dim={truncate_dim} has no effect on {cls.__name__}, which returns no "
            "embeddings: omit truncate_dim"
        )
    settings = cls.read_settings(directory, allow_pickle=allow_pickle, check_finite=check_finite)
    files = open_tensors(directory, variant=variant, allow_pickle=allow_pickle)
    rules = quantization_config
    if rules is None and isinstance(config.quantization_config, EasyDeLQuantizationConfig):
        rules = config.quantization_config
    if apply_quantization and rules is None:
        raise ConfigError(
            "apply_quantization=True without a quantization_config, which is neither an argument "
            'nor in config.json: pass one, such as quantization_config={"dtype": "nf4"}'
        )
    if apply_quantization is None and rules is not None:
        warn_of_plain_weights(rules)
    module = load_module(
        cls,
        config,
        files,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        shard=auto_shard_model,
        quantization=rules if apply_quantization else None,
        check_finite=check_finite,
    )
    adapters = files.read_adapters()
    if adapters:  # the package of adapters imports this one
        attach = pkgutil.resolve_name("ed_models.adapters.peft:attach_adapter_matrices")
        module = _place_layers(
            attach(module, adapters, directory), module.config, shard=auto_shard_model
        )
    if quantization_config is not None and not apply_quantization:
        model_task = to_spec(quantization_config)  # type: ignore[arg-type]
        settings = settings | {"config": module.config.replace(quantization_config=model_task)}
    for name, value in settings.items():
        if isinstance(value, nnx.List):  # modules with weights in separate files
            value = _place_layers(value, module.config, shard=auto_shard_model)
        setattr(module, name, value)
    if truncate_dim is not None:
        cast(Any, module).truncate_embeddings(truncate_dim)
    return module


#: Keyword of `transformers` -> what to write instead.
_INSTEAD = {
    **dict.fromkeys(("torch_dtype", "params_dtype"), "use dtype and param_dtype"),
    **dict.fromkeys(
        ("device_map", "device", "tp_plan", "max_memory"),
        "use sharding_axis_dims, the devices along (dp, fsdp, ep, tp, sp), and backend",
    ),
    "load_in_4bit": "use quantization_config={'dtype': 'nf4'} and apply_quantization=True",
    "load_in_8bit": "use quantization_config={'dtype': 'int8'} and apply_quantization=True",
    "attn_implementation": "use config_kwargs={'attn_mechanism': ...}",
    "config": "use config_kwargs, a mapping of the fields to change",
    "trust_remote_code": "omit it: no code of a repository is run",
    "use_safetensors": "omit it, or use allow_pickle=True for pytorch_model.bin",
    "low_cpu_mem_usage": "omit it: weights are read directly onto their devices",
    "ignore_mismatched_sizes": "omit it: each tensor must have the shape of its parameter",
    "use_auth_token": "use token",
    "seed": "omit it: new heads have the same values in each run",
}


#: Fields of the configuration that callers of `transformers` pass as keywords.
_LABELS = ("num_labels", "id2label", "label2id", "problem_type")


def _split_labels(keywords: HubOptions) -> tuple[dict[str, object], HubOptions]:
    """Return the fields of labels, which are part of the configuration, and the other keywords."""
    pairs = cast("Mapping[str, object]", keywords)
    labels = {name: pairs[name] for name in _LABELS if name in pairs}
    rest = {name: value for name, value in pairs.items() if name not in labels}
    return labels, cast("HubOptions", rest)


def drop_redundant_keywords(keywords: HubOptions) -> HubOptions:
    """Return the keywords without those of EasyDeL that have no effect here.

    `from_torch`: the files of a folder name their format. `device` of jax: weights are read
    straight onto the devices of the mesh. `verbose`: the log contains the messages.
    """
    return cast(
        "HubOptions",
        {
            name: value
            for name, value in keywords.items()
            if name not in ("from_torch", "verbose")
            and not (name == "device" and isinstance(value, jax.Device))
        },
    )


def check_loading_keywords(keywords: Iterable[str]) -> None:
    """Check the further keywords of `from_pretrained`.

    Raises:
        KeywordError: a keyword is unknown; the message says what to write instead.
    """
    options = inspect.signature(from_pretrained).parameters
    option_names = [*(name for name in options if name != "hub"), *HubOptions.__annotations__]
    fields = {
        name: f"it is a field of the configuration: use config_kwargs={{{name!r}: ...}}"
        for name in (*FIELDS, *FIELD_ALIASES)
    }
    refuse_keywords("from_pretrained", keywords, option_names, {**fields, **_INSTEAD})


def check_weights(directory: Path, task: TaskType | str = TaskType.AUTO_BIND) -> None:
    """Compare the names and shapes of a checkpoint's tensors with its configuration.

    Args:
        directory: a local directory.
        task: see `from_pretrained`.

    Raises:
        CheckpointError: a tensor is missing, left over, or has another shape or kind.
    """
    _prepare_checkpoint(directory, task)


def find_carried_tensors(
    directory: Path, task: TaskType | str = TaskType.AUTO_BIND
) -> CarriedTensors | None:
    """Return the further tensors of a checkpoint beside those of its model of a task.

    Args, Raises: see `check_weights`.
    """
    return _prepare_checkpoint(directory, task).carried


def without_values(directory: Path, task: TaskType | str = TaskType.AUTO_BIND) -> nnx.Module:
    """Return the model of a checkpoint with shapes in the place of its arrays.

    Args, Raises: see `check_weights`.
    """
    draft = _prepare_checkpoint(directory, task).draft
    with nnx.use_eager_sharding(False):
        return nnx.merge(draft.graphdef, draft.state)


def _prepare_checkpoint(directory: Path, task: TaskType | str) -> CheckedFiles:
    task = canonical_task(task)
    config = read_config(directory, task, sharding_axis_dims=(1, 1, 1, 1, 1))
    config = _for_task(config, None, task, directory)
    cls = _class_for(None, task, config, directory)
    return prepare_module(cls, config, open_tensors(directory))


def _for_task(
    config: EasyDeLBaseConfig,
    module_class: type[LoadableT] | None,
    task: TaskType | str,
    directory: Path,
) -> EasyDeLBaseConfig:
    """Return the configuration of the model of a task: of a multimodal checkpoint, the text half
    or the vision tower for tasks that only this part has."""
    parts = [getattr(config, name, None) for name in ("text_config", "vision_config")]
    for part in parts:
        if isinstance(part, EasyDeLBaseConfig) and _selects_part(
            part, config, module_class, task, directory
        ):
            part.read_basics_from_config(config)
            shared = ("tie_word_embeddings", "quantization_config")
            return part.replace(**{name: getattr(config, name, None) for name in shared})
    return config


def _selects_part(
    part: Any,
    config: EasyDeLBaseConfig,
    module_class: type[LoadableT] | None,
    task: TaskType | str,
    directory: Path,
) -> bool:
    """Return whether only a part of a multimodal model has a class or a task."""
    if module_class is not None:
        model_type = getattr(module_class, "model_type", None)
        return model_type == part.model_type != config.model_type
    task = canonical_task(task)
    task = detect_task(directory) if task == TaskType.AUTO_BIND else task
    is_part = task not in registry.list_tasks(config.model_type)
    return is_part and task in registry.list_tasks(part.model_type)


def _place_layers(layers: _ModuleT, config: EasyDeLBaseConfig, *, shard: bool) -> _ModuleT:
    """Return layers with their arrays on the devices of the model."""
    if shard:
        return placement.shard(layers, config)
    graphdef, state = nnx.split(layers)
    return nnx.merge(graphdef, jax.device_put(state, config.mesh.devices.flat[0]))


def _class_for(
    module_class: type[LoadableT] | None,
    task: TaskType | str,
    config: EasyDeLBaseConfig,
    directory: Path,
) -> type[LoadableT]:
    if module_class is not None:
        model_type = getattr(module_class, "model_type", None)
        if model_type not in (None, config.model_type):
            raise CheckpointError(
                f"{directory} holds a model of type {config.model_type!r}, and "
                f"{module_class.__name__} is of type {model_type!r}; AutoEasyDeLModelForCausalLM "
                "and the "
                "other classes like it take the class that fits"
            )
        return module_class
    task = canonical_task(task)
    task = detect_task(directory) if task == TaskType.AUTO_BIND else task
    return registry.get_module(task, config.model_type)
