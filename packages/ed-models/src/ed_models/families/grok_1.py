"""Grok-1 (xAI 2024): norms around attention and experts, and a factor on embeddings and logits.

- attention scores have a separate scale (`attn_output_multiplier`) and a soft cap
- the weights of the chosen experts are their shares in the softmax over all experts
- GELU is the tanh approximation of xAI's code; `hidden_act="gelu"` is the exact function, which the
  conversion to torch computes

Numbers follow xAI's `model.py`, parameter names the conversion to torch (`modeling_grok1.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import SandwichLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("grok-1")
class Grok1Config(EasyDeLBaseConfig):
    """Fields of the conversion, and execution fields from `EasyDeLBaseConfig`."""

    model_type = "grok-1"
    vocab_size: int = 131072
    hidden_size: int = 6144
    intermediate_size: int = 32768
    num_hidden_layers: int = 64
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] | None = None
    attn_output_multiplier: float = 128**-0.5
    max_attn_value: float = 30.0
    embedding_multiplier_scale: float = 78.38367176906169
    output_multiplier_scale: float = 0.5773502691896257
    num_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True


class Grok1DecoderLayer(SandwichLayer):
    """Attention and experts, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Grok1Config = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        scores = ScoreRule(scale=config.attn_output_multiplier, soft_cap=config.max_attn_value)
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k, normalize=False),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        super().__init__(parts, self_attn=SelfAttention(parts, scores=scores), mlp=mlp)


class Grok1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Grok1Config
    layer_class = Grok1DecoderLayer

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier_scale


@register_module(TaskType.CAUSAL_LM, config=Grok1Config, model_type="grok-1")
class Grok1ForCausalLM(CausalLM):
    """Grok-1 with a language-model head."""

    body_class = Grok1Model
    WEIGHTS = renamed(
        {
            "input_layernorm.weight": "pre_attn_norm.scale",
            "post_attention_layernorm.weight": "post_attn_norm.scale",
            "pre_feedforward_layernorm.weight": "pre_moe_norm.scale",
            "post_feedforward_layernorm.weight": "post_moe_norm.scale",
            "norm.weight": "norm.scale",
            "self_attn": "attn",
            "mlp": "moe_block",
            "gate_proj": "linear",
            "up_proj": "linear_v",
            "down_proj": "linear_1",
        },
        EXPERTS,
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), scale=self.config.output_multiplier_scale)
