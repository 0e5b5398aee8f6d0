"""Qwen3.5 with experts, text (Qwen Team 2026): the layers of Qwen3.5, experts in all of them.

- three layers of the gated delta rule, then one of attention with a gate on its outputs
- the softmax weights of the chosen experts add up to one; a shared expert has a gate
- norms store `weight - 1`

Numbers follow Hugging Face's `modeling_qwen3_5_moe.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.experts import qwen_experts
from ed_models.body.gated_delta import SPLIT_DELTA, GatedHybrid, GatedHybridLayer
from ed_models.checkpoints.tensor_files import Computed, Index, TensorFiles
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.blocks import Shape
from ed_models.weights.rules import EXPERTS, renamed


@register_config("qwen3_5_moe_text")
class Qwen3_5MoeTextConfig(EasyDeLBaseConfig, transformers.Qwen3_5MoeTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_5_moe_text"


class Qwen3_5MoeDecoderLayer(GatedHybridLayer):
    """The delta rule or attention, then experts."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, index, qwen_experts(parts))


class Qwen3_5MoeTextModel(GatedHybrid):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3_5MoeTextConfig
    layer_class = Qwen3_5MoeDecoderLayer


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


@register_module(TaskType.CAUSAL_LM, config=Qwen3_5MoeTextConfig, model_type="qwen3_5_moe_text")
class Qwen3_5MoeForCausalLM(CausalLM):
    """Qwen3.5 with experts and a language-model head."""

    body_class = Qwen3_5MoeTextModel
    WEIGHTS = renamed({"shared_experts": "shared_expert"}, EXPERTS, *SPLIT_DELTA)
    as_published = staticmethod(separate_experts)
    locate_parts = staticmethod(locate_experts)
