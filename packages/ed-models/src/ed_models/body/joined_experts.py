"""Checkpoints with one tensor for all experts of a layer, of models that name the tensors of each
expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from ed_models.checkpoints.tensor_files import Computed, Index, TensorFiles
from ed_models.weights.blocks import Shape


def locate_experts(
    shapes: Mapping[str, Shape], joined: Mapping[str, Shape]
) -> dict[str, tuple[str, Index]]:
    """Return the places of the tensors of each expert in the tensors of all experts.

    Published checkpoints have `experts.gate_up_proj` [e, 2 * f, d] and `experts.down_proj`
    [e, d, f]; transformers writes `experts.7.gate_proj.weight` and so on.

    Args:
        shapes: the tensors of a model.
        joined: the tensors of all experts.

    Returns:
        name -> name of the tensor of all experts, and the index of the expert and its rows.
    """
    places: dict[str, tuple[str, Index]] = {}
    for name in shapes:
        stem, _, expert_name = name.partition(".experts.")
        expert, _, projection = expert_name.removesuffix(".weight").partition(".")
        is_half = projection in ("gate_proj", "up_proj")
        joined_name = f"{stem}.experts.{'gate_up_proj' if is_half else projection}"
        if joined_name not in joined or int(expert) >= joined[joined_name][0]:
            continue
        size = joined[joined_name][1] // (2 if is_half else 1)
        start = size if projection == "up_proj" else 0
        places[name] = joined_name, (int(expert), slice(start, start + size))
    return places


def separate_experts(files: TensorFiles, shapes: Mapping[str, Shape]) -> TensorFiles:
    """Return the tensors of each expert, of a checkpoint with one tensor for all experts."""

    def read(joined_name: str, place: Index, index: Index) -> np.ndarray:
        return files.read(joined_name, place)[index]

    absent = {name: shape for name, shape in shapes.items() if name not in files}
    stored = {name: entry.shape for name, entry in files.items()}
    computed: dict[str, Computed] = {}
    for name, (joined_name, place) in locate_experts(absent, stored).items():
        rows = place[1]
        assert isinstance(rows, slice)
        shape = (rows.stop - rows.start, stored[joined_name][2])
        entry = replace(files[joined_name], shape=shape)
        computed[name] = Computed(entry, partial(read, joined_name, place))
    joined_names = {joined_name for joined_name, _ in locate_experts(absent, stored).values()}
    if not computed:
        return files
    return files.rename_tensors(dict.fromkeys(joined_names)).add_tensors(computed)
