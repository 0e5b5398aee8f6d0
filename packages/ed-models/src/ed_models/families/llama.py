"""Llama (Touvron et al. 2023; Llama 3, 2024): the decoder that most others are variations of.

- pre-norm residual blocks, RMSNorm, no biases by default
- rotary positions on queries and keys, halves rotated; Llama 3's frequency scaling from the config
- grouped-query attention: `num_key_value_heads` keys and values serve `num_attention_heads` queries
- gated SiLU feed-forward
- head tied to the embedding if `tie_word_embeddings` is set

Numbers follow Hugging Face's `modeling_llama.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("llama")
class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "llama"


class LlamaDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: LlamaConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
        )


class LlamaModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = LlamaConfig
    layer_class = LlamaDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=LlamaConfig, model_type="llama")
class LlamaForCausalLM(CausalLM):
    """Llama with a language-model head."""

    body_class = LlamaModel
