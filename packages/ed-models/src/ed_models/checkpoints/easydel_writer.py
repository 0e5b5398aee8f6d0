"""Write a model as a folder that EasyDeL loads.

The folder has the arrays and their index, but no `model_structure.json`: EasyDeL writes a pickle
into this file and does not need it to load a model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_infra.config.fields import SECTION
from ed_infra.errors import CheckpointError
from ed_layers.quantization.qarray import QArray
from flax import nnx

from ed_models.checkpoints.easydel_folder import MODEL_PREFIX
from ed_models.checkpoints.easydel_layout import (
    get_easydel_rules,
    name_easydel_arrays,
    rename_easydel_tensor,
)
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.saving import Saved, TokenizerFiles, layer_values
from ed_models.checkpoints.task_rules import get_weight_rules
from ed_models.checkpoints.tensor_files import EASYDEL_INDEX, Index
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.checkpoints.zarr_arrays import write_zarr
from ed_models.weights.rules import TIED

#: Version of the layout, which EasyDeL records.
_VERSION = "0.0.99"


def save_easydel_folder(
    module: Saved, directory: str | Path, *, tokenizer: TokenizerFiles | None = None
) -> Path:
    """Save the configuration, the weights and the tokenizer of a model in EasyDeL's layout.

    All processes must call this function; process 0 writes.

    Args:
        module: a model without adapters and without quantized matrices.
        directory: a new or empty directory.
        tokenizer: is saved beside the model.

    Returns:
        The directory.

    Raises:
        CheckpointError: The directory is not empty, or the model is quantized.
        ConfigError: The names of this family in EasyDeL's folders are not known.
    """
    directory = Path(directory)
    if directory.exists() and (directory.is_file() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty: choose a new directory")
    state = nnx.state(module)
    leaves = (variable.get_value() for _, variable in nnx.to_flat_state(state))
    if any(isinstance(leaf, QArray) for leaf in leaves):
        raise CheckpointError(
            "the model is quantized, and EasyDeL's folders contain plain weights: call "
            "model.dequantize() first"
        )
    weights = weight_map(type(module), state, module.config)
    model_type = module.config.model_type
    sources = {rename_easydel_tensor(name, model_type): name for name in weights.hf_shapes}
    embeddings = {
        name for name, old in sources.items() if weights.by_hf[old][0].ours.endswith(".embedding")
    }
    sources |= _list_tied_heads(module, weights, model_type)
    shapes = {name: weights.hf_shapes[old] for name, old in sources.items()}
    named = name_easydel_arrays(shapes, embeddings, model_type)
    arrays = WeightMap(get_easydel_rules(model_type), named)
    read_layer = layer_values(state)

    def read(name: str, index: Index) -> np.ndarray:
        return weights.save(sources[name], read_layer)[index]

    is_first = jax.process_index() == 0
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        entries = []
        for name, shape in sorted(named.items()):
            dtype = read(arrays.by_ours[name][0].hf, ()).dtype
            values = np.empty(shape, dtype)
            arrays.load(name, [range(size) for size in shape], read, values)
            path = "/".join([MODEL_PREFIX, *name.split(".")])
            entries.append({"path": path, "shape": list(shape), "dtype": dtype.name})
            if is_first:
                write_zarr(staging / path, values)
        if is_first:
            _write_settings(module, staging, entries)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            if directory.exists():
                directory.rmdir()
            staging.chmod(0o755)  # mkdtemp makes it private
            staging.replace(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _list_tied_heads(module: Saved, weights: WeightMap, model_type: str) -> dict[str, str]:
    """Return the heads of a tied model, which EasyDeL stores as copies: name -> embedding."""
    if not getattr(module.config, "tie_word_embeddings", False):
        return {}
    heads = {}
    for head, embedding in getattr(type(module), "TIED_WEIGHTS", TIED).items():
        pieces = weights.by_ours.get(embedding)
        if pieces and head not in weights.by_ours:
            shape = tuple(reversed(weights.shapes[embedding]))
            rules = get_weight_rules(type(module))
            (name,) = WeightMap(rules, {head: shape}, module.config).hf_shapes
            heads[rename_easydel_tensor(name, model_type)] = pieces[0].hf
    return heads


def _write_settings(module: Saved, folder: Path, entries: list[dict[str, Any]]) -> None:
    """Write the configuration, the settings of generation and the index."""
    architecture = module.architecture or type(module).__name__
    module.config.replace(architectures=[architecture]).save_pretrained(folder)
    path = folder / "config.json"
    fields: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    _write(path, {name: value for name, value in fields.items() if name != SECTION})
    module.write_settings(folder)
    index = {"format": "tensorstore", "version": _VERSION, "prefixes": {MODEL_PREFIX: entries}}
    _write(folder / EASYDEL_INDEX, index)
    metadata = {
        "version": _VERSION,
        "timestamp": datetime.now(UTC).replace(tzinfo=None).isoformat(),
        "checksum": {},
        "array_metadata": {},
        "framework_version": None,
        "custom_metadata": {},
    }
    _write(folder / "checkpoint_metadata.json", metadata)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
