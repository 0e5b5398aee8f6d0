"""Write a module as a directory that Hugging Face `transformers` can load.

The files are written to a temporary directory and moved into place when complete; `config.json`
goes last, so that a directory that has one is whole.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import jax
import numpy as np
from ed_infra import parameter_names
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.distributed import on_host
from ed_infra.dtypes import floating_dtype
from ed_infra.errors import CheckpointError
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from flax import nnx
from jax.typing import DTypeLike

from ed_models.checkpoints.carried import CarriedTensors
from ed_models.checkpoints.hub import resolve
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.quantized_tensors import get_matrix_parts, quantization_settings
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.tensor_writer import TensorSpec, write_order, write_tensors

# Files of the model that was in the directory before.
_REPLACED = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "*_Pooling",
    "*_Dense",
    "*_Normalize",
)


class Saved(Protocol):
    """A module, as far as saving goes."""

    config: EasyDeLBaseConfig
    #: What config.json calls the class; None = the class's own name.
    architecture: ClassVar[str | None]

    def write_settings(self, directory: Path) -> None:
        """Write the files other than config.json and the weights."""
        ...

    def separate_tensors(self) -> Mapping[str, Mapping[str, jax.Array]]:
        """Return folder -> name -> array of the weights in further files."""
        ...


class TokenizerFiles(Protocol):
    """What writes itself into a directory."""

    def save_pretrained(self, save_directory: Path, /) -> object: ...


#: Files of tokenizers and processors in a directory of transformers.
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("spiece.model", "sentencepiece*.model", "*.tiktoken", "tekken.json", "chat_template*"),
    "additional_chat_templates/*.jinja",
)
_PROCESSOR_FILES = ("*processor_config.json",)
#: Further files of a checkpoint: custom classes, licenses, and adapters beside the model, which may
#: have folders.
_COMPANIONS = (
    *_PROCESSOR_FILES,
    *("*.py", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*"),
    *(
        place + name
        for place in ("", "*/")
        for name in ("adapter_config.json", "adapter_model*.safetensors")
    ),
)


@dataclass(frozen=True)
class StoredTokenizer:
    """The files of the tokenizer and the processor of a checkpoint, which are copied unchanged."""

    directory: Path

    def save_pretrained(self, save_directory: Path, /) -> None:
        """Copy the files."""
        for file in find_tokenizer_files(self.directory):
            _copy_file(file, save_directory / file.relative_to(self.directory))


def find_tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer and a processor in a directory."""
    return _find_files(directory, (*_TOKENIZER_FILES, *_PROCESSOR_FILES))


def _find_files(directory: Path, patterns: Iterable[str]) -> list[Path]:
    files = (file for pattern in patterns for file in directory.glob(pattern))
    return sorted({file for file in files if file.is_file()})


def _copy_file(file: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, target)


def copy_companions(source: str | None, target: Path, *, revision: str | None = None) -> None:
    """Copy the further files of a checkpoint that a directory lacks.

    Args:
        source, revision: see `find_checkpoint`.
        target: directory with a model that was loaded from there.
    """
    directory = find_checkpoint(source, revision)
    if directory is None:
        return
    for file in _find_files(directory, _COMPANIONS):
        copy = target / file.relative_to(directory)
        if not copy.exists():
            _copy_file(file, copy)


def find_stored_tokenizer(
    source: str | None, target: Path, *, revision: str | None = None
) -> StoredTokenizer | None:
    """Return the tokenizer of the checkpoint that a model was loaded from.

    Args:
        source, revision: see `find_checkpoint`.
        target: directory that the model is saved to.

    Returns:
        None if the target has a tokenizer, or the checkpoint has none on this machine.
    """
    directory = None if find_tokenizer_files(target) else find_checkpoint(source, revision)
    if directory is None or not find_tokenizer_files(directory):
        return None
    return StoredTokenizer(directory)


def find_checkpoint(source: str | None, revision: str | None = None) -> Path | None:
    """Return the directory with the settings of a checkpoint; None if it is not on this machine.

    Args:
        source: what `ed_models.checkpoints.hub.resolve` accepts; of a repository, the files in the
            cache are used.
        revision: branch, tag or commit of a repository.
    """
    if not source:
        return None
    try:
        return resolve(source, weights=False, revision=revision, local_files_only=True)
    except CheckpointError:
        return None


def save_model(
    module: Saved,
    directory: str | Path,
    *,
    tokenizer: TokenizerFiles | None = None,
    max_shard_size: int | str = "5GB",
    dtype: DTypeLike | None = None,
    carried: CarriedTensors | None = None,
) -> None:
    """Save configuration, weights, generation settings and, where given, the tokenizer.

    Weights are copied from the devices one tensor at a time. All processes must call this;
    process 0 writes.

    Args:
        module: an `EasyDeLBaseModule`.
        directory: made if it is not there. In one that exists, a model in it is replaced and other
            files stay.
        max_shard_size: bytes, or `"5GB"`; a larger model is split into files with an index.
        dtype: floating-point weights are converted to it in the file, quantized ones are not; None
            keeps all.
        carried: the further content of the checkpoint that the model was loaded from, which is
            copied; None = nothing.

    Raises:
        CheckpointError: `directory` is a file, or a file with carried tensors has changed.
        ConfigError: `max_shard_size` is no size, or `dtype` no floating-point dtype.
    """
    target_dtype = None if dtype is None else np.dtype(floating_dtype("dtype", dtype))
    directory = Path(directory)
    if directory.is_file():
        raise CheckpointError(f"{directory} is a file; save_pretrained writes a directory")
    state = nnx.state(module)
    weights = weight_map(type(module), state, module.config, stored=True)
    leaves, parts = _by_name(state)

    def stored_dtype(name: str) -> np.dtype:
        ours = weights.by_hf[name][0].ours
        leaf_dtype = leaves[ours][0].dtype
        keeps_dtype = ours in parts or not jax.numpy.issubdtype(leaf_dtype, jax.numpy.floating)
        return leaf_dtype if keeps_dtype or target_dtype is None else target_dtype

    is_first = jax.process_index() == 0
    carried = carried or CarriedTensors(str(directory), ())
    copied_files = carried.open_files() if is_first else TensorFiles({})
    joined = carried.place_parts(type(module), weights.hf_shapes)
    joined_parts = {part for places in joined.values() for part in places}
    empty_names = list_empty(state)
    separate_names = [
        name
        for name in weights.hf_shapes
        if name not in joined_parts and weights.by_hf[name][0].ours not in empty_names
    ]
    names = {carried.restore_name(name): name for name in (*separate_names, *joined)}
    shapes = {**dict(carried.joined), **weights.hf_shapes}
    specs = {
        n: TensorSpec(shapes[name], stored_dtype(next(iter(joined.get(name, ())), name)))
        for n, name in names.items()
    }
    model_dtypes = [spec.dtype for n, spec in specs.items() if names[n] not in parts]
    specs |= carried.list_specs(written=names)

    def read(name: str) -> np.ndarray:
        if name not in names:
            return copied_files.read_bytes(name) if is_first else np.zeros(0, np.uint8)
        places = joined.get(names[name])
        if places is None:
            value = weights.save(names[name], lambda ours, at: _at(*leaves[ours], at))
            return value.astype(specs[name].dtype, copy=False)
        whole = np.empty(specs[name].shape, specs[name].dtype)
        for part, index in places.items():
            whole[index] = weights.save(part, lambda ours, at: _at(*leaves[ours], at))
        return whole

    separate = {  # gathering is collective
        folder: {name: on_host(array) for name, array in arrays.items()}
        for folder, arrays in module.separate_tensors().items()
    }
    if not is_first:
        for name in write_order(specs, max_shard_size):  # gathering is collective
            read(name)
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            write_tensors(staging, specs, read, max_shard_size=max_shard_size)
            _write_config(module, staging, model_dtypes, carried)
            module.write_settings(staging)
            for folder, arrays in separate.items():
                _write_separate(staging / folder, arrays, target_dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            _publish(staging, directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"saved {directory.name}")


def _by_name(
    state: nnx.State,
) -> tuple[dict[str, tuple[jax.Array, tuple[int, ...]]], frozenset[str]]:
    """Map each canonical name to its leaf, and to its place in it where layers are stacked.

    Returns:
        the map, and the names that are parts of quantized matrices.
    """
    leaves: dict[str, tuple[jax.Array, tuple[int, ...]]] = {}
    parts: set[str] = set()
    for path, variable in nnx.to_flat_state(state):
        stacked = parameter_names.is_stacked(path)
        value = variable.get_value()
        value = value.value if isinstance(value, Simulated) else value
        for i, name in enumerate(parameter_names.canonical(path)):
            at = (i,) if stacked else ()
            if isinstance(value, QArray):
                matrix_leaves = {
                    f"{name}.{part}": (leaf, at) for part, leaf in get_matrix_parts(value).items()
                }
                parts |= matrix_leaves.keys()
                leaves |= matrix_leaves
            else:
                leaves[name] = (value, at)
    return leaves, frozenset(parts)


def list_empty(state: nnx.State) -> frozenset[str]:
    """Return the canonical names of the optional tensors that are zero, which files omit."""
    return frozenset(
        name
        for path, variable in nnx.to_flat_state(state)
        if variable.get_metadata().get("optional") and not jax.numpy.any(variable.get_value())
        for name in parameter_names.canonical(path)
    )


#: (canonical name, leading positions) -> values on the host.
LayerReader = Callable[[str, tuple[int, ...]], np.ndarray]


def layer_values(state: nnx.State) -> LayerReader:
    """Return a function (canonical name, leading positions) -> values on the host."""
    leaves, _ = _by_name(state)
    return lambda name, at: _at(*leaves[name], at)


@jax.jit
def _take(leaf: jax.Array, entry: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, entry, 0, keepdims=False)


def _at(leaf: jax.Array, layer: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """Bring one layer's tensor to the host, or one expert of it."""
    for entry in (*layer, *at):
        leaf = _take(leaf, np.int32(entry))
    return on_host(leaf)


def _write_config(
    module: Saved, directory: Path, dtypes: list[np.dtype], carried: CarriedTensors
) -> None:
    floats = [dtype for dtype in dtypes if jax.numpy.issubdtype(dtype, jax.numpy.floating)]
    widest = max(floats, key=lambda d: d.itemsize).name if floats else "float32"
    changes = {"architectures": [module.architecture or type(module).__name__], "dtype": widest}
    quantization = quantization_settings(module)  # type: ignore[arg-type]
    if quantization is not None:
        changes |= {"quantization_config": quantization}
    config = module.config.replace(**changes)
    if carried.settings is None:
        config.save_pretrained(directory)
        return
    fields = json.loads(config.to_json_string(use_diff=False))
    whole = carried.restore_settings(json.loads(config.to_json_string()), fields)
    text = json.dumps(whole, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _write_separate(folder: Path, arrays: Mapping[str, np.ndarray], dtype: np.dtype | None) -> None:
    specs = {name: TensorSpec(x.shape, dtype or x.dtype) for name, x in arrays.items()}
    write_tensors(folder, specs, lambda name: arrays[name].astype(specs[name].dtype, copy=False))


def _publish(staging: Path, directory: Path) -> None:
    """Move the finished files to their place, replacing a model that is there."""
    if not directory.exists():
        staging.chmod(0o755)  # mkdtemp makes it private
        staging.replace(directory)
        return
    # Without config.json the directory is no model; an interruption from here on cannot leave one
    # that mixes old and new.
    (directory / "config.json").unlink(missing_ok=True)
    for pattern in _REPLACED:
        for old in directory.glob(pattern):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for new in sorted(staging.iterdir(), key=lambda p: p.name == "config.json"):
        target = directory / new.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        new.replace(target)
