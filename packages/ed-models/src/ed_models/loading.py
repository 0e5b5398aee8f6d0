"""Fill a module from safetensors files: each device reads its own slice, nothing is read twice.

The module is built without values (`nnx.eval_shape`), so that shapes are compared before a byte is
read, and no host ever holds more than one parameter besides its own shards.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import paths, sharding
from ed_infra.errors import CheckpointError, did_you_mean
from flax import nnx
from huggingface_hub.utils import tqdm

from ed_models.tensor_files import TensorFiles
from ed_models.weights import IGNORED, STANDARD, Shape, WeightMap, window_of

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


def load(
    cls: type[ModuleT],
    config: Any,
    directory: str | Path,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = None,
    precision: Any = None,
    shard: bool = True,
) -> ModuleT:
    """Build `cls(config)` with the weights of a local directory in Hugging Face's layout.

    Args:
        cls: a module class; its `WEIGHTS` table, if any, says where its parameters lie.
        config: its configuration; gives the mesh and the sharding.
        dtype: what the module computes in.
        param_dtype: what parameters are kept in, whatever the file's dtype; None = `dtype`. Values
            are converted once, directly.
        precision: of matrix products.
        shard: place the parameters as the config's rules say; otherwise whole on one device.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape; all are listed.
    """
    param_dtype = dtype if param_dtype is None else param_dtype
    with nnx.use_eager_sharding(False):
        abstract = nnx.eval_shape(
            lambda: cls(config, dtype, param_dtype, precision, rngs=nnx.Rngs(0))  # type: ignore[call-arg]
        )
    graphdef, state = nnx.split(abstract)
    files = TensorFiles.open(directory)
    weights = weight_map(cls, state)
    check(weights, files, directory, tied=bool(getattr(config, "tie_word_embeddings", False)))

    variables = nnx.to_flat_state(state)
    if shard:
        placement = dict(nnx.to_flat_state(sharding.shardings(state, config)))
    else:
        one = jax.sharding.SingleDeviceSharding(config.mesh.devices.flat[0])
        placement = {path: one for path, _ in variables}
    filled = []
    # Stays silent where stderr is no terminal, and for models that load at once.
    with tqdm(total=len(variables), desc="loading", disable=None, delay=2) as bar:
        for path, variable in variables:
            value = _fill(path, variable.get_value(), placement[path], weights, files)
            filled.append((path, variable.replace(value)))
            bar.update()
    with nnx.use_eager_sharding(False):
        return nnx.merge(graphdef, nnx.from_flat_state(filled))


def weight_map(cls: type, state: nnx.State) -> WeightMap:
    """Apply a class's rules to the parameters of its (possibly abstract) state."""
    shapes: dict[str, Shape] = {}
    for path, variable in nnx.to_flat_state(state):
        shape = variable.get_value().shape
        shape = shape[1:] if paths.is_stacked(path) else shape
        shapes |= dict.fromkeys(paths.canonical(path), tuple(shape))
    return WeightMap(getattr(cls, "WEIGHTS", STANDARD), shapes)


def check(weights: WeightMap, files: TensorFiles, directory: Any, *, tied: bool) -> None:
    """Compare what the model wants with what the files hold.

    Args:
        tied: the head is the embedding; a copy of it in the files is then no leftover.

    Raises:
        CheckpointError: they differ.
    """
    wanted = weights.hf_shapes
    missing = [name for name in wanted if name not in files]
    extra = [
        name
        for name in files
        if name not in wanted
        and not any(re.search(pattern, name) for pattern in IGNORED)
        and not (tied and name == "lm_head.weight")
    ]
    shapes = [
        f"{name}: the file has {list(files[name].shape)}, the model {list(shape)}"
        for name, shape in wanted.items()
        if name in files and files[name].shape != shape
    ]
    parts = _listing("missing", [n + did_you_mean(n, extra) for n in missing])
    parts += _listing("not in the model", [n + did_you_mean(n, missing) for n in extra])
    parts += _listing("of another shape", shapes)
    if parts:
        raise CheckpointError(
            f"the weights in {directory} do not fit the model that its configuration describes "
            f"({len(wanted)} tensors):\n" + "\n".join(parts)
        )


def _listing(what: str, entries: list[str], limit: int = 12) -> list[str]:
    if not entries:
        return []
    rest = [f"    … and {len(entries) - limit} more"] if len(entries) > limit else []
    return [f"  {what} ({len(entries)}):", *(f"    {e}" for e in entries[:limit]), *rest]


def _fill(
    path: tuple,
    leaf: jax.ShapeDtypeStruct,
    placement: jax.sharding.Sharding,
    weights: WeightMap,
    files: TensorFiles,
) -> jax.Array:
    """Make one parameter (a stack of layers, or one tensor) from its slices."""
    names = paths.canonical(path)
    stacked = paths.is_stacked(path)
    slices: dict[tuple, np.ndarray] = {}  # replicas ask for the same slice

    def read(index: Any) -> np.ndarray:
        window = window_of(index, leaf.shape)
        key = tuple((w.start, w.stop) for w in window)
        if key not in slices:
            out = np.empty([len(w) for w in window], leaf.dtype)
            if stacked:
                for row, layer in enumerate(window[0]):
                    weights.load(names[layer], window[1:], files.read, out[row, ...])
            else:
                weights.load(names[0], window, files.read, out)
            slices[key] = out
        return slices[key]

    return jax.make_array_from_callback(leaf.shape, placement, read)
