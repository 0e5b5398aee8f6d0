"""The dtypes with which the models of a run are created and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError

from ed_elarge.config.run_config import RunConfig

#: Formats of tensors in safetensors files that a frozen model keeps.
_KEPT = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def list_dtypes(run: RunConfig, frozen_directory: Path | None = None) -> dict[str, Any]:
    """Return the dtypes and the precision of a model as arguments of its class.

    A frozen model keeps the dtype of its files, unless the run file sets `loader.param_dtype`: an
    optimizer needs float32, and wider copies of frozen weights have equal values.

    Args:
        run: The run.
        frozen_directory: The directory of a model whose weights are frozen.
    """
    loader = run.loader
    precision = None if loader.precision in (None, "default") else loader.precision
    param_dtype = loader.param_dtype
    if frozen_directory is not None and "param_dtype" not in loader.model_fields_set:
        param_dtype = find_stored_dtype(frozen_directory) or param_dtype
    return {"dtype": loader.dtype, "param_dtype": param_dtype, "precision": precision}


def plan_param_dtype(run: RunConfig) -> str:
    """Return the dtype of the model's parameters by the configuration alone."""
    loader = run.loader
    new = run.model is None or run.model.config is not None
    if new or "param_dtype" in loader.model_fields_set or not trains_adapters_only(run):
        return loader.param_dtype
    config = run.known_model or {}
    name = config.get("dtype") or config.get("torch_dtype")
    return str(name) if name in _KEPT.values() else loader.param_dtype


def find_stored_dtype(directory: Path) -> str | None:
    """Return the dtype of most parameters in safetensors files, or in a folder of EasyDeL; None
    for other files."""
    from ed_models.checkpoints.pickled_files import open_tensors

    try:
        entries = open_tensors(directory).values()
    except CheckpointError:
        return None
    sizes: dict[str, int] = {}
    for entry in entries:
        sizes[entry.format] = sizes.get(entry.format, 0) + entry.stop - entry.start
    return _KEPT.get(max(sizes, key=sizes.__getitem__)) if sizes else None


def trains_adapters_only(run: RunConfig) -> bool:
    """Whether the weights of the model are frozen, and the run trains adapters over them."""
    adapters = run.adapters
    return adapters is not None and run.weight_format is None and not adapters.modules_to_save
