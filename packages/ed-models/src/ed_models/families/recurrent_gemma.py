"""RecurrentGemma (Botev et al. 2024): two gated linear recurrences, then a layer of attention.

- attention has a window; half of each head turns
- norms store `weight - 1`; embeddings are multiplied by the root of the hidden size
- the feed-forward layer has half of `intermediate_size` and biases; logits have a soft cap

Numbers follow Hugging Face's `modeling_recurrent_gemma.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from ed_layers.recurrence.rg_lru import RGLRU

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("recurrent_gemma")
class RecurrentGemmaConfig(EasyDeLBaseConfig, transformers.RecurrentGemmaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "recurrent_gemma"


class RecurrentGemmaDecoderLayer(DecoderLayer):
    """A recurrence or attention, then a feed-forward layer, each normed before."""

    def __init__(self, parts: Parts, index: int):
        config: RecurrentGemmaConfig = parts.config
        act = config.hidden_activation
        if config.layers_block_type[index] == "linear_attention":
            heads, taps = config.num_attention_heads, config.conv1d_width
            mixer = RGLRU(parts, config.lru_width, heads, taps=taps, hidden_act=act)
        else:
            window = config.attention_window_size
            mixer = SelfAttention(
                parts, bias=config.attention_bias, out_bias=True, mask=MaskRule(window=window)
            )
        super().__init__(
            parts,
            self_attn=mixer,
            mlp=GatedMLP(parts, config.intermediate_size // 2, hidden_act=act, bias=True),
        )


class RecurrentGemmaModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = RecurrentGemmaConfig
    layer_class = RecurrentGemmaDecoderLayer
    multiplies_by_width = True

    @staticmethod
    def layer_kinds(config):
        return config.layers_block_type

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, offset=1.0, scale_first=True)

    def enter(self, x, ctx):
        # Hugging Face keeps the factor in bfloat16.
        return x * jnp.asarray(self.config.hidden_size**0.5, jnp.bfloat16).astype(x.dtype)


@register_module(TaskType.CAUSAL_LM, config=RecurrentGemmaConfig, model_type="recurrent_gemma")
class RecurrentGemmaForCausalLM(CausalLM):
    """RecurrentGemma with a language-model head."""

    body_class = RecurrentGemmaModel
    WEIGHTS = renamed(
        {
            "input_layernorm": "temporal_pre_norm",
            "post_attention_layernorm": "channel_pre_norm",
            "self_attn.conv1d": "temporal_block.conv_1d",
            "self_attn.input_gate_weight": "temporal_block.rg_lru.input_gate_weight",
            "self_attn.input_gate_bias": "temporal_block.rg_lru.input_gate_bias",
            "self_attn.recurrent_gate_weight": "temporal_block.rg_lru.recurrent_gate_weight",
            "self_attn.recurrent_gate_bias": "temporal_block.rg_lru.recurrent_gate_bias",
            "self_attn.recurrent_param": "temporal_block.rg_lru.recurrent_param",
            "self_attn": "temporal_block",
            "mlp": "mlp_block",
            "model.norm": "model.final_norm",
        },
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), soft_cap=self.config.logits_soft_cap)
