"""Kolibri1 (2026): DeepseekV3 with further norms behind attention and feed-forward and a window in
layers of type `sliding_attention`.

- further norms behind attention and feed-forward
- a window in layers of type `sliding_attention`
- rotary positions only in the layers with a window
- norms of queries and keys by head
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by sigmoids
- a bias that takes part only in the choice of experts
- shared experts for all tokens

Numbers follow Hugging Face's `modeling_kolibri1.py`; parameter names are its names.
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
from ed_models.body.layers import SandwichLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("kolibri1")
class Kolibri1Config(EasyDeLBaseConfig, transformers.Kolibri1Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "kolibri1"


class Kolibri1DecoderLayer(SandwichLayer):
    """Attention and experts, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Kolibri1Config = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        mlp = SparseMLP(
            parts,
            gate=Router(
                parts,
                experts,
                k,
                score="sigmoid",
                normalize=config.norm_topk_prob,
                selection_bias=True,
                ranks_logits=True,
            ),
            experts=Experts(parts, experts, config.moe_intermediate_size),
            shared=GatedMLP(parts, config.shared_expert_intermediate_size),
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                norm=QKNorm(parts.norm),
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary()
                if config.sliding_window is None or get_layer_window(config, index)
                else None,
            ),
            mlp=mlp,
        )


class Kolibri1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Kolibri1Config
    layer_class = Kolibri1DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Kolibri1Config, model_type="kolibri1")
class Kolibri1ForCausalLM(CausalLM):
    """Kolibri1 with a language-model head."""

    body_class = Kolibri1Model

    WEIGHTS = renamed(
        {
            "mlp.gate.e_score_correction_bias": "moe.router.expert_bias",
            "post_attention_layernorm": "post_attn_norm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_ffn_norm",
        },
        EXPERTS,
        *STANDARD,
    )
