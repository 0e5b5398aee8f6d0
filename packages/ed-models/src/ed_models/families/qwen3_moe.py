"""Qwen3-MoE (Qwen Team 2025): Qwen3 with experts, none of them shared.

- each query and key head is RMS-normed before the rotary positions
- the softmax weights of the chosen experts add up to one if `norm_topk_prob` is set
- `decoder_sparse_step` and `mlp_only_layers` select the layers with experts

Numbers follow Hugging Face's `modeling_qwen3_moe.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import has_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("qwen3_moe")
class Qwen3MoeConfig(EasyDeLBaseConfig, transformers.Qwen3MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_moe"


class Qwen3MoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen3MoeConfig = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.norm),
            mask=MaskRule(window=config.sliding_window),
        )
        mlp = self.sparse(parts) if has_experts(config, index) else GatedMLP(parts)
        super().__init__(parts, self_attn=attention, mlp=mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Qwen3MoeConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        return SparseMLP(
            parts,
            gate=Router(parts, experts, k, normalize=config.norm_topk_prob),
            experts=Experts(parts, experts, config.moe_intermediate_size),
        )


class Qwen3MoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3MoeConfig
    layer_class = Qwen3MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [has_experts(config, i) for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=Qwen3MoeConfig, model_type="qwen3_moe")
class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-MoE with a language-model head."""

    body_class = Qwen3MoeModel
    WEIGHTS = (EXPERTS, *STANDARD)
