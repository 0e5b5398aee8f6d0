"""Cohere's mixture of experts (Cohere 2025): Command A's layer with experts.

- three layers with a window and rotary positions, then one without either
- attention and experts side by side behind one norm, a layer norm without bias or an RMS norm
- shared experts are added to the chosen ones, or averaged with them
- `mlp_layer_types` selects the dense layers; these may turn although they see all

Numbers follow Hugging Face's `modeling_cohere2_moe.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import ParallelLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("cohere2_moe")
class Cohere2MoeConfig(EasyDeLBaseConfig, transformers.Cohere2MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "cohere2_moe"


class Cohere2MoeSparse(SparseMLP):
    """Experts, and shared experts that may be averaged with them."""

    def __init__(self, parts: Parts):
        config: Cohere2MoeConfig = parts.config
        experts, f, shared = config.num_experts, config.intermediate_size, config.num_shared_experts
        score = config.expert_selection_fn
        # Softmax is over the chosen ones alone, which adds up to one without more ado.
        normalize = score == "softmax" or config.norm_topk_prob
        super().__init__(
            parts,
            gate=Router(
                parts, experts, config.num_experts_per_tok, score=score, normalize=normalize
            ),
            experts=Experts(parts, experts, f),
            shared=GatedMLP(parts, f * shared) if shared else None,
        )
        self.average = config.shared_expert_combination_strategy == "average"

    def combine_outputs(self, routed, shared):
        return (routed + shared) / 2 if self.average else routed + shared


class Cohere2MoeDecoderLayer(ParallelLayer):
    """Attention and experts side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: Cohere2MoeConfig = parts.config
        dense = config.mlp_layer_types[index] == "dense"
        window = get_layer_window(config, index)
        turns = window is not None or (dense and config.prefix_dense_sliding_window_pattern == 1)
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            position=Rotary(interleaved=True) if turns else None,
            mask=MaskRule(window=window),
        )
        if dense:
            mlp = GatedMLP(parts, config.prefix_dense_intermediate_size)
        else:
            mlp = Cohere2MoeSparse(parts)
        super().__init__(parts, self_attn=attention, mlp=mlp)


class Cohere2MoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Cohere2MoeConfig
    layer_class = Cohere2MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.mlp_layer_types, strict=True))

    @staticmethod
    def build_norm(parts):
        config: Cohere2MoeConfig = parts.config
        if config.rms_norm_eps is not None:
            return parts.norm
        return partial(parts.layer_norm, eps=config.layer_norm_eps, bias=False)


@register_module(TaskType.CAUSAL_LM, config=Cohere2MoeConfig, model_type="cohere2_moe")
class Cohere2MoeForCausalLM(CausalLM):
    """Cohere2-MoE with a language-model head."""

    body_class = Cohere2MoeModel
    WEIGHTS = (EXPERTS, *STANDARD)

    def head(self):
        return replace(super().head(), scale=self.config.logit_scale)
