"""StableLM (Stability AI 2023): Llama with layer norms, a quarter of each head turns.

- attention and feed-forward one after another, or side by side (`use_parallel_residual`)
- queries and keys may be normed, each head with separate weights (`qk_layernorm`)

Numbers follow Hugging Face's `modeling_stablelm.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, ParallelLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, equal, stack


@register_config("stablelm")
class StableLmConfig(EasyDeLBaseConfig, transformers.StableLmConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "stablelm"


def _make_layer(parts: Parts, index: int) -> DecoderLayer:
    """Attention and feed-forward, side by side or one after another."""
    config: StableLmConfig = parts.config
    attention = SelfAttention(
        parts,
        bias=config.use_qkv_bias,
        out_bias=False,
        norm=QKNorm(
            partial(parts.layer_norm, eps=config.layer_norm_eps, bias=False)
            if config.qk_layernorm
            else None,
            heads="own",
        ),
    )
    layer = ParallelLayer if config.use_parallel_residual else DecoderLayer
    return layer(
        parts,
        self_attn=attention,
        mlp=GatedMLP(parts),
        dropout=config.hidden_dropout,
    )


class StableLmModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = StableLmConfig
    layer_class = staticmethod(_make_layer)

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)


@register_module(TaskType.CAUSAL_LM, config=StableLmConfig, model_type="stablelm")
class StableLmForCausalLM(CausalLM):
    """StableLm with a language-model head."""

    body_class = StableLmModel

    WEIGHTS = (
        Rule(
            "{path}.q_norm.weight", "{path}.q_layernorm.norms.{head}.weight", stack("head", equal)
        ),
        Rule(
            "{path}.k_norm.weight", "{path}.k_layernorm.norms.{head}.weight", stack("head", equal)
        ),
        *STANDARD,
    )
