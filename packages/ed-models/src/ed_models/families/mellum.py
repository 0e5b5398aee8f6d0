"""Mellum (JetBrains 2026): Laguna with `num_experts_per_tok` of `num_experts` experts for each
token, weighted by a softmax.

- a window in layers of type `sliding_attention`
- rotary frequencies for each type of layer
- norms of queries and keys by head
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by a softmax

Numbers follow Hugging Face's `modeling_mellum.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window, rope_kind
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("mellum")
class MellumConfig(EasyDeLBaseConfig, transformers.MellumConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mellum"


class MellumDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MellumConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        sparse = config.mlp_layer_types[index] == "sparse"
        mlp = (
            SparseMLP(
                parts,
                gate=Router(parts, experts, k, normalize=config.norm_topk_prob),
                experts=Experts(parts, experts, config.moe_intermediate_size),
            )
            if sparse
            else GatedMLP(parts)
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                norm=QKNorm(parts.norm),
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary(rope_kind(config, config.layer_types[index])),
            ),
            mlp=mlp,
        )


class MellumModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MellumConfig
    layer_class = MellumDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.mlp_layer_types, strict=True))


@register_module(TaskType.CAUSAL_LM, config=MellumConfig, model_type="mellum")
class MellumForCausalLM(CausalLM):
    """Mellum with a language-model head."""

    body_class = MellumModel

    WEIGHTS = (EXPERTS, *STANDARD)
