"""Flint (Recursive 2026): Qwen3Moe with a window in layers of type `sliding_attention` and rotary
positions only in the layers with a window.

- a window in layers of type `sliding_attention`
- rotary positions only in the layers with a window
- norms of queries and keys by head
- a trained logit of each head in the softmax (a sink)
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by sigmoids
- shared experts for all tokens

Numbers follow Hugging Face's `modeling_flint.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import has_experts
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("flint")
class FlintConfig(EasyDeLBaseConfig, transformers.FlintConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "flint"


class FlintDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: FlintConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        sparse = has_experts(config, index)
        mlp = (
            SparseMLP(
                parts,
                gate=Router(parts, experts, k, score="sigmoid", normalize=config.norm_topk_prob),
                experts=Experts(parts, experts, config.moe_intermediate_size),
                shared=GatedMLP(parts, config.shared_expert_intermediate_size),
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
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary() if get_layer_window(config, index) else None,
                scores=ScoreRule(sinks=True),
            ),
            mlp=mlp,
        )


class FlintModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = FlintConfig
    layer_class = FlintDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(
            zip(
                config.layer_types,
                [has_experts(config, i) for i in range(config.num_hidden_layers)],
                strict=True,
            )
        )

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=FlintConfig, model_type="flint")
class FlintForCausalLM(CausalLM):
    """Flint with a language-model head."""

    body_class = FlintModel

    WEIGHTS = renamed(
        {
            "self_attn.sinks": "self_attn.softmax_offset",
            "mlp.shared_experts": "mlp.shared_expert",
        },
        EXPERTS,
        *STANDARD,
    )
