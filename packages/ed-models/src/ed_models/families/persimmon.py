"""Persimmon (EleutherAI 2023): a decoder with layer norms and norms of queries and keys by head
(`qk_layernorm`).

- layer norms
- norms of queries and keys by head (`qk_layernorm`)
- biases in all projections of the attention
- a feed-forward without a gate

Numbers follow Hugging Face's `modeling_persimmon.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("persimmon")
class PersimmonConfig(EasyDeLBaseConfig, transformers.PersimmonConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "persimmon"


class PersimmonDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: PersimmonConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts, bias=True, norm=QKNorm(parts.own_norm if config.qk_layernorm else None)
            ),
            mlp=MLP(parts),
            dropout=config.hidden_dropout,
        )


class PersimmonModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = PersimmonConfig
    layer_class = PersimmonDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)


@register_module(TaskType.CAUSAL_LM, config=PersimmonConfig, model_type="persimmon")
class PersimmonForCausalLM(CausalLM):
    """Persimmon with a language-model head."""

    body_class = PersimmonModel

    WEIGHTS = renamed(
        {
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "query_key_value", groups="num_attention_heads"),
        *STANDARD,
    )
