"""Qwen3-VL-MoE (Qwen Team 2025): Qwen3-VL with experts in the language model.

- the softmax weights of the chosen experts add up to one; no expert is shared
- the vision tower and the positions are those of Qwen3-VL

Numbers follow Hugging Face's `modeling_qwen3_vl_moe.py`; parameter names are its names.
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
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.context import alternate_axes
from ed_models.body.decoder import Decoder
from ed_models.body.experts import has_experts
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import AddingLayer
from ed_models.body.patch_tower import PatchTower, deep_tower
from ed_models.body.patch_weights import NESTED, NESTED_NAMES, patch_weights
from ed_models.checkpoints.tensor_files import Computed, Index, TensorFiles
from ed_models.modalities.videos import FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.blocks import Shape
from ed_models.weights.rules import NESTED_TIED, STANDARD, Rule, split, transpose

#: Rules of the language model, in the layout that transformers writes.
_TEXT_WEIGHTS = (
    Rule(
        ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
        "{path}.experts.gate_up_proj",
        split(-2, transpose),
    ),
    Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", transpose),
    *STANDARD,
)


def turned_experts(files: TensorFiles, shapes: Mapping[str, Shape]) -> TensorFiles:
    """Return the experts of published checkpoints, whose last two dimensions are swapped, in the
    layout that transformers writes."""

    def read(name: str, index: Index) -> np.ndarray:
        return np.swapaxes(files.read(name), 1, 2)[index]

    computed: dict[str, Computed] = {}
    for name, shape in shapes.items():
        if ".experts." not in name or name not in files or files[name].shape == shape:
            continue
        entry = files[name]
        if entry.shape == (shape[0], shape[2], shape[1]):
            computed[name] = Computed(replace(entry, shape=shape), partial(read, name))
    return files.add_tensors(computed) if computed else files


class Qwen3VLMoeVisionConfig(EasyDeLBaseConfig, transformers.Qwen3VLMoeVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl_moe_vision"


@register_config("qwen3_vl_moe_text")
class Qwen3VLMoeTextConfig(EasyDeLBaseConfig, transformers.Qwen3VLMoeTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl_moe_text"


@register_config("qwen3_vl_moe")
class Qwen3VLMoeConfig(EasyDeLBaseConfig, transformers.Qwen3VLMoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl_moe"
    nested_configs = {"vision_config": Qwen3VLMoeVisionConfig}


class Qwen3VLMoeTextDecoderLayer(AddingLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen3VLMoeTextConfig = parts.config
        attention = SelfAttention(parts, bias=config.attention_bias, norm=QKNorm(parts.norm))
        mlp = self.sparse(parts) if has_experts(config, index) else GatedMLP(parts)
        super().__init__(parts, self_attn=attention, mlp=mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Qwen3VLMoeTextConfig = parts.config
        experts = config.num_experts
        return SparseMLP(
            parts,
            gate=Router(parts, experts, config.num_experts_per_tok, normalize=True),
            experts=Experts(parts, experts, config.moe_intermediate_size),
        )


class Qwen3VLMoeTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3VLMoeTextConfig
    layer_class = Qwen3VLMoeTextDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [has_experts(config, i) for i in range(config.num_hidden_layers)]

    def rope_settings(self):
        return alternate_axes(super().rope_settings(), (24, 20, 20))


@register_module(TaskType.CAUSAL_LM, config=Qwen3VLMoeTextConfig, model_type="qwen3_vl_moe_text")
class Qwen3VLMoeTextForCausalLM(CausalLM):
    """The language model of Qwen3-VL-MoE."""

    body_class = Qwen3VLMoeTextModel
    WEIGHTS = _TEXT_WEIGHTS
    as_published = staticmethod(turned_experts)


class Qwen3VLMoeModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Qwen3VLMoeConfig

    def tower(self, parts: Parts) -> PatchTower:
        return deep_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen3VLMoeConfig, model_type="qwen3_vl_moe")
class Qwen3VLMoeForConditionalGeneration(ConditionalLM):
    """Qwen3-VL-MoE with a language-model head."""

    body_class = Qwen3VLMoeModel
    modality = FRAMES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = patch_weights(NESTED_NAMES, text=_TEXT_WEIGHTS, stored=NESTED)
    as_published = staticmethod(turned_experts)
