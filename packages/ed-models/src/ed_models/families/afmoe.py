"""Afmoe (Arcee AI 2025): Llama with further norms behind attention and feed-forward and a window in
layers of type `sliding_attention`.

- further norms behind attention and feed-forward
- a window in layers of type `sliding_attention`
- rotary positions only in the layers with a window
- norms of queries and keys by head
- a sigmoid gate on the outputs of the attention
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by sigmoids
- a bias that takes part only in the choice of experts
- shared experts for all tokens
- a factor on the embeddings

Numbers follow Hugging Face's `modeling_afmoe.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

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


@register_config("afmoe")
class AfmoeConfig(EasyDeLBaseConfig, transformers.AfmoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "afmoe"


class AfmoeDecoderLayer(SandwichLayer):
    """Attention and experts, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: AfmoeConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        sparse = index >= config.num_dense_layers
        mlp = (
            SparseMLP(
                parts,
                gate=Router(
                    parts,
                    experts,
                    k,
                    score="sigmoid",
                    scale=config.route_scale,
                    selection_bias=True,
                ),
                experts=Experts(parts, experts, config.moe_intermediate_size),
                shared=GatedMLP(parts, config.moe_intermediate_size * config.num_shared_experts),
            )
            if sparse
            else GatedMLP(parts)
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                norm=QKNorm(parts.own_norm),
                gated=True,
                gate_bias=False,
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary() if config.layer_types[index] == "sliding_attention" else None,
            ),
            mlp=mlp,
        )


class AfmoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = AfmoeConfig
    layer_class = AfmoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(
            zip(
                config.layer_types,
                [i >= config.num_dense_layers for i in range(config.num_hidden_layers)],
                strict=True,
            )
        )

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)

    multiplies_by_width = True

    def enter(self, x, ctx):
        return x * (self.config.hidden_size**0.5 if self.config.mup_enabled else 1.0)


@register_module(TaskType.CAUSAL_LM, config=AfmoeConfig, model_type="afmoe")
class AfmoeForCausalLM(CausalLM):
    """Afmoe with a language-model head."""

    body_class = AfmoeModel

    WEIGHTS = renamed(
        {
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "self_attn.g_proj": "self_attn.gate_proj",
            "mlp.gate": "mlp.router.gate",
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        EXPERTS,
        *STANDARD,
    )
