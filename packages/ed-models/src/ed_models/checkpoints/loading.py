"""Fill a module from safetensors files: each device reads its own slice, nothing is read twice.

The module is built without values (`nnx.eval_shape`), so that shapes are compared before a byte is
read, and no host ever holds more than one tensor besides its own shards.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.dtypes import floating_dtype
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean
from ed_infra.logging import get_logger, once
from ed_infra.sharding import placement as sharding
from ed_layers.quantization.model import QuantizationRules, quantize
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from flax import nnx
from huggingface_hub.utils import tqdm
from jax.typing import DTypeLike

from ed_models.checkpoints.carried import CarriedTensors, find_carried
from ed_models.checkpoints.filling import (
    SeparateParam,
    fill,
    fill_quantized,
    fill_simulated,
    fill_stored,
)
from ed_models.checkpoints.gguf.kept_codes import kept_codes
from ed_models.checkpoints.leftovers import find_leftovers, rename_legacy_tensors
from ed_models.checkpoints.packed_tensors import unpack_tensors
from ed_models.checkpoints.quantized_tensors import (
    PARTS_AS_THEY_ARE,
    get_matrix_parts,
    stored_rules,
)
from ed_models.checkpoints.task_rules import get_weight_rules
from ed_models.checkpoints.tensor_files import TensorFiles, compute_arrays
from ed_models.checkpoints.text_halves import text_tensors, tower_tensors
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.rules import TIED, Rule, renamer

_ModuleT = TypeVar("_ModuleT")

logger = get_logger(__name__)
_BLOCK = 2**22  # elements of a head that are compared at a time
_MOST_THREADS = 4
#: Number of modules without values that are kept for the next load, such as a swap of models.
_MOST_STRUCTURES = 4


class Draft(NamedTuple):
    """A module without values, and the sharding of its values."""

    graphdef: nnx.GraphDef
    state: nnx.State
    weights: WeightMap


class CheckedFiles(NamedTuple):
    """A module without values, and the files that contain its tensors.

    Attributes:
        config: the configuration of the module, which may differ from that of the files.
        is_stored: whether the files contain quantized matrices of this project.
        carried: the further content of the files, which saving copies.
        rules: rules by which the matrices of the module are quantized; None = none are.
    """

    draft: Draft
    config: EasyDeLBaseConfig
    files: TensorFiles
    is_stored: bool
    carried: CarriedTensors | None
    rules: QuantizationRules | None = None


def load_module(
    cls: type[_ModuleT],
    config: EasyDeLBaseConfig,
    files: TensorFiles,
    *,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    shard: bool = True,
    quantization: QuantizationRules | None = None,
    check_finite: bool = True,
) -> _ModuleT:
    """Build `cls(config)` with weights in Hugging Face's layout.

    If `config` ties the head, but the files contain a head with other values than the
    embedding's, the head is loaded separately, and the module's config is changed; `transformers`
    does the same. A body that was saved alone loads although its names lack the first part, and a
    body alone loads from the files of a model with a head. A text model reads the tensors of the
    language model in a multimodal checkpoint (`ed_models.checkpoints.text_halves`). Packed tensors
    (`ed_models.checkpoints.packed_tensors`) become plain ones, and the module's config is changed.
    Quantized matrices of this project's own files are loaded without unpacking.

    Args:
        cls: a module class. `WEIGHTS` maps its parameters to tensors. `OTHER_NAMES` lists other
            names of tensors in checkpoints (`ed_models.weights.rules.renamer`). `TIED_WEIGHTS` maps
            heads to embeddings. `new_tensors` returns random values of tensors that checkpoints
            of another task lack. `as_published` computes tensors
            that some writer lays out in another way, and `locate_parts` returns their places in
            the writer's tensors, so that they are written in the same way.
        config: its configuration, which contains the mesh and the sharding rules.
        files: the files that contain the tensors.
        dtype: dtype of activations.
        param_dtype: what parameters are kept in, whatever the file's dtype; None = `dtype`. Values
            are converted once, directly.
        precision: of matrix products.
        shard: place the parameters by the config's rules; otherwise whole on one device.
        quantization: rules by which matrices are quantized as they are read: of each stack one
            layer's matrix is in memory unquantized. None = none are.
        check_finite: refuse tensors with NaN or infinite numbers.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape or kind; all are listed.
            Or the configuration has more layers than the files have tensors, or a tensor has
            numbers that are not finite.
        ConfigError: a dtype is unknown or no floating-point one, or matrices are to be quantized
            that are quantized in the files.
    """
    dtype = jnp.dtype(floating_dtype("dtype", dtype))
    chosen_dtype = dtype if param_dtype is None else param_dtype
    param_dtype = jnp.dtype(floating_dtype("param_dtype", chosen_dtype))

    draft, config, files, is_stored, carried, _ = prepare_module(
        cls, config, files, dtype, param_dtype, precision=precision, quantization=quantization
    )
    graphdef, state, weights = draft

    def read(name: str, window: Sequence[range], out: np.ndarray) -> None:
        weights.load(name, window, files.read, out, check_finite=check_finite)

    variables = nnx.to_flat_state(state)
    placement = _placements(state, config, variables, shard=shard)
    special = {QArray: fill_stored if is_stored else fill_quantized, Simulated: fill_simulated}

    def load_variable(item: tuple[Any, Any]) -> tuple[Any, Any]:
        path, variable = item
        leaf = variable.get_value()
        make = special.get(type(leaf), fill)
        return path, variable.replace(make(path, leaf, placement[path], read))

    filled = []
    # No progress bar if stderr is no terminal, or if the model loads quickly.
    bar = tqdm(total=len(variables), desc="loading", disable=None, delay=2)
    with bar, ThreadPoolExecutor(_threads(config, files, quantization)) as threads:
        try:
            for variable_item in threads.map(load_variable, variables):
                filled.append(variable_item)
                bar.update()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    with nnx.use_eager_sharding(False):
        module = nnx.merge(graphdef, nnx.from_flat_state(filled))
    if carried is not None:
        module.carried_tensors = carried
    return module


def _threads(
    config: EasyDeLBaseConfig, files: TensorFiles, quantization: QuantizationRules | None
) -> int:
    """Return the number of tensors that are read at the same time.

    With one tensor at a time, a host holds only this tensor besides its shards. Plain tensors in
    host memory need no further memory.
    """
    in_host = all(device.platform == "cpu" for device in config.mesh.devices.flat)
    is_unquantized = quantization is None and type(files) is TensorFiles
    return min(os.cpu_count() or 1, _MOST_THREADS) if in_host and is_unquantized else 1


def prepare_module(
    cls: type,
    config: EasyDeLBaseConfig,
    files: TensorFiles,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    *,
    precision: jax.lax.PrecisionLike = None,
    quantization: QuantizationRules | None = None,
) -> CheckedFiles:
    """Compare the names and shapes of files with those of a model, without reading values.

    Args, Raises: see `load_module`.
    """
    param_dtype = jnp.dtype(param_dtype)
    stored = stored_rules(config)
    if stored is not None and quantization is not None:
        raise ConfigError(
            f"the matrices in {files.directory} are quantized, and codes cannot be quantized "
            "again: omit quantization_config, or quantize the original checkpoint"
        )
    stored_codes = kept_codes(files, quantization)
    rules = stored if stored_codes is not None or stored is not None else quantization
    check_depth(config, files)

    def draft(config: EasyDeLBaseConfig) -> Draft:
        if rules is None:
            source = getattr(config, "name_or_path", None), getattr(config, "_commit_hash", None)
            structure = _known_structure(cls, config, source, dtype, param_dtype, precision)
        else:
            structure = _structure(cls, config, dtype, param_dtype, precision, rules)
        # The state is filled; the structure is kept for the next load.
        graphdef, state = structure[0], jax.tree.map(lambda leaf: leaf, structure[1])
        names = rules_of_files(get_weight_rules(cls), config)
        return Draft(
            graphdef, state, weight_map(cls, state, config, stored=stored is not None, rules=names)
        )

    is_packed = isinstance(config.quantization_config, Mapping) and stored is None
    rules_of_files, stored_config, opened_files = files.rules, config, files
    files, config = unpack_tensors(files, config)
    plain_files = files
    model_draft = draft(config)
    files = files.reshape_tensors(model_draft.weights.hf_shapes, config)
    if towers := getattr(cls, "TOWER_NAMES", ()):
        files = tower_tensors(files, towers)
    else:
        files = text_tensors(files, model_draft.weights.hf_shapes)
    text_files = files
    files = rename_legacy_tensors(files, model_draft.weights.hf_shapes)
    files = _with_prefix(cls, files, model_draft.weights.hf_shapes)
    files = _with_our_names(cls, files, model_draft.weights.hf_shapes)
    if is_packed:
        files = _without_zero_biases(model_draft.weights, files)
    published_files = files
    if hasattr(cls, "as_published"):
        files = cls.as_published(files, model_draft.weights.hf_shapes)
    if hasattr(cls, "new_tensors"):
        missing = {n: shape for n, shape in model_draft.weights.hf_shapes.items() if n not in files}
        new = cls.new_tensors(config, missing)
        files = files.add_tensors(compute_arrays(files, new)) if new else files
    if getattr(config, "tie_word_embeddings", False) and find_leftovers(model_draft.weights, files):
        untied = config.replace(tie_word_embeddings=False)
        untied_draft = draft(untied)
        merged = _with_one_matrix(cls, untied_draft.weights, files, param_dtype)
        if merged is None:
            once(
                logger,
                f"{files.directory}: tie_word_embeddings is true, but the files hold a head that "
                "differs from the embedding; it is loaded as a separate head "
                "(tie_word_embeddings=False)",
            )
            model_draft, config = untied_draft, untied
        files = merged or files
    if stored_codes is not None:
        files, stored = stored_codes.files_and_rules(
            files, model_draft.graphdef, model_draft.state, model_draft.weights
        )
        rules = stored
        model_draft = model_draft if stored is None else draft(config)
    _check(model_draft.weights, model_draft.state, files, stored=stored is not None)
    carried = None
    if type(opened_files) is TensorFiles and not towers:
        carried = find_carried(
            cls,
            stored_config,
            plain_files,
            text_files,
            published_files,
            files,
            model_draft.weights,
        )
    return CheckedFiles(model_draft, config, files, stored is not None, carried, rules)


def _structure(
    cls: type,
    config: EasyDeLBaseConfig,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    precision: jax.lax.PrecisionLike,
    rules: QuantizationRules | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return a module without values."""

    def build() -> Any:
        module = cls(config, dtype, param_dtype, precision, rngs=nnx.Rngs(0))
        return module if rules is None else quantize(module, rules)

    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(build))


@lru_cache(maxsize=_MOST_STRUCTURES)
def _known_structure(
    cls: type,
    config: EasyDeLBaseConfig,
    source: tuple[str | None, str | None],
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    precision: jax.lax.PrecisionLike,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return a module without values, which takes half a second for 30 layers.

    Args:
        source: name and revision of `config`, whose equality ignores them.
    """
    return _structure(cls, config, dtype, param_dtype, precision)


def _placements(
    state: nnx.State, config: EasyDeLBaseConfig, variables: Iterable[tuple], *, shard: bool
) -> dict[tuple, Any]:
    """Return the sharding of each variable, or a quantized matrix of shardings."""
    if shard:
        return dict(nnx.to_flat_state(sharding.shardings(state, config)))
    one = jax.sharding.SingleDeviceSharding(config.mesh.devices.flat[0])
    return {path: jax.tree.map(lambda _: one, v.get_value()) for path, v in variables}


def weight_map(
    cls: type,
    state: nnx.State,
    config: EasyDeLBaseConfig,
    *,
    stored: bool = False,
    rules: Sequence[Rule] | None = None,
) -> WeightMap:
    """Apply a class's rules to the parameters of its (possibly abstract) state.

    Args:
        stored: whether a quantized matrix is its codes and scales; else the plain one.
        rules: other rules, such as those of another layout; None = the rules of the class.
    """
    shapes = {name: tuple(leaf.shape[at:]) for name, leaf, at in _tensors(state, stored=stored)}
    rules = get_weight_rules(cls) if rules is None else rules
    return WeightMap((*PARTS_AS_THEY_ARE, *rules) if stored else rules, shapes, config)


def _tensors(state: nnx.State, *, stored: bool) -> Iterator[tuple[str, Any, int]]:
    """Each layer's tensors: name, array, and how many dimensions in front are those of a stack."""
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, SeparateParam):
            continue
        value = variable.get_value()
        at = int(parameter_names.is_stacked(path))
        for name in parameter_names.canonical(path):
            if stored and isinstance(value, QArray):
                for part, leaf in get_matrix_parts(value).items():
                    yield f"{name}.{part}", leaf, at
            else:
                yield name, value, at


def check_depth(config: EasyDeLBaseConfig, files: TensorFiles) -> None:
    """Compare the number of layers with the number of tensors, before any layer is built.

    Raises:
        CheckpointError: There are more layers than tensors, and each layer has at least one tensor.
    """
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and files and layers > len(files):
        raise CheckpointError(
            f"num_hidden_layers is {layers}, and the weights in {files.directory} are only "
            f"{len(files)} tensors: the configuration is of another model, or damaged"
        )


def _check(
    weights: WeightMap, state: nnx.State, files: TensorFiles, *, stored: bool = False
) -> None:
    """Compare the tensors of the model with those of the files; `stored` is that of `weight_map`.

    Raises:
        CheckpointError: they differ.
    """
    model_shapes = weights.hf_shapes
    missing = [name for name in model_shapes if name not in files]
    extra = find_leftovers(weights, files)
    common_entries = [(name, files[name]) for name in model_shapes if name in files]
    shapes = [
        f"{name}: the file has {list(entry.shape)}, the model {list(model_shapes[name])}"
        for name, entry in common_entries
        if entry.shape != model_shapes[name]
    ]
    dtypes = {name: leaf.dtype for name, leaf, _ in _tensors(state, stored=stored)}
    kinds = [
        f"{name}: {entry.file.name} has {entry.format}, the model {model_dtype}"
        for name, entry in common_entries
        for model_dtype in [dtypes[weights.by_hf[name][0].ours]]
        if _kind(entry.dtype) != _kind(model_dtype)
    ]
    parts = _listing("missing", [n + did_you_mean(n, extra) for n in missing])
    parts += _listing("not in the model", [n + did_you_mean(n, missing) for n in extra])
    parts += _listing("of another shape", shapes)
    parts += _listing(
        "of another kind, as the codes of a quantized checkpoint are, which is not read", kinds
    )
    if missing and all(weights.by_hf[n][0].ours.startswith("lm_head.") for n in missing):
        parts.append(
            "  the head of an untied model is missing: load the body alone (the task base-module), "
            "or use the embedding as the head (config_kwargs={'tie_word_embeddings': True})"
        )
    if parts:
        raise CheckpointError(
            f"the weights in {files.directory} do not fit the model that its configuration "
            f"describes ({len(model_shapes)} tensors):\n" + "\n".join(parts)
        )


def _kind(dtype: np.dtype) -> str:
    kinds = (jnp.floating, jnp.integer, jnp.complexfloating)
    return next((k.__name__ for k in kinds if jnp.issubdtype(dtype, k)), dtype.name)


def _listing(heading: str, entries: list[str], limit: int = 12) -> list[str]:
    if not entries:
        return []
    more_lines = [f"    … and {len(entries) - limit} more"] if len(entries) > limit else []
    return [f"  {heading} ({len(entries)}):", *(f"    {e}" for e in entries[:limit]), *more_lines]


def _with_prefix(cls: type, files: TensorFiles, model_names: Collection[str]) -> TensorFiles:
    """Add or drop the first part of all names: `h.0.…` and `transformer.h.0.…`.

    A body that was saved without its head lacks that part, and a body alone has names without
    it; `transformers` reads both.
    """
    ((prefix, _),) = Counter(name.partition(".")[0] for name in model_names).most_common(1)
    if not files or any(name.startswith(f"{prefix}.") for name in files):
        return files
    ((file_prefix, _),) = Counter(name.partition(".")[0] for name in files).most_common(1)
    longer = {n: f"{prefix}.{n}" for n in files}
    shorter = {n: n.removeprefix(f"{file_prefix}.") for n in files}
    rename = renamer(getattr(cls, "OTHER_NAMES", {}))
    fitting = (
        {n: new for n, new in m.items() if new in model_names or rename(new) in model_names}
        for m in (longer, shorter)
    )
    return files.rename_tensors(max(fitting, key=len))


def _with_our_names(cls: type, files: TensorFiles, model_names: Collection[str]) -> TensorFiles:
    """Read a tensor that the model lacks under its name in `OTHER_NAMES` of the class."""
    rename = renamer(getattr(cls, "OTHER_NAMES", {}))
    new_names = {name: rename(name) for name in files if name not in model_names}
    return files.rename_tensors(
        {n: to for n, to in new_names.items() if to in model_names and to not in files}
    )


def _without_zero_biases(weights: WeightMap, files: TensorFiles) -> TensorFiles:
    """Remove biases of zeros that the model lacks: AutoGPTQ adds one to each of
    its layers."""
    biases = [n for n in find_leftovers(weights, files) if n.endswith(".bias")]
    return files.rename_tensors({n: None for n in biases if not files.read(n).any()})


def _with_one_matrix(
    cls: type, untied: WeightMap, files: TensorFiles, dtype: np.dtype
) -> TensorFiles | None:
    """Keep one matrix for each head and its embedding, under the embedding's name.

    Args:
        untied: the tensors of the model with separate heads.
        dtype: of the parameters; values count as equal if they are in it.

    Returns:
        None if the files hold two matrices, and they differ.
    """
    for head, embedding in getattr(cls, "TIED_WEIGHTS", TIED).items():
        names, embedding_names = (
            {p.hf for p in untied.by_ours.get(n, [])} for n in (head, embedding)
        )
        if not names or not names <= files.keys():
            continue
        if files.keys().isdisjoint(embedding_names):
            files = files.rename_tensors(dict(zip(names, embedding_names, strict=True)))
        elif _equal(untied, files, head, embedding, dtype):
            files = files.rename_tensors(dict.fromkeys(names))
        else:
            return None
    return files


def _equal(
    weights: WeightMap, files: TensorFiles, head: str, embedding: str, dtype: np.dtype
) -> bool:
    """Compare a head [d, v] with an embedding [v, d], block by block."""
    names = [p.hf for name in (head, embedding) for p in weights.by_ours[name]]
    if any(n not in files or files[n].shape != weights.hf_shapes[n] for n in names):
        return False
    d, v = weights.shapes[head]
    rows = max(1, _BLOCK // d)
    for start in range(0, v, rows):
        window = range(start, min(v, start + rows))
        a, b = np.empty((2, len(window), d), dtype)
        weights.load(embedding, [window, range(d)], files.read, a)
        weights.load(head, [range(d), window], files.read, b.T)
        if not np.array_equal(a, b):
            return False
    return True
