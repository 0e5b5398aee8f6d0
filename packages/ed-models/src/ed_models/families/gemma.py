"""Gemma (Gemma Team 2024): Llama with scaled embeddings and norms around one.

- embeddings are multiplied by the root of the hidden size
- norms store `weight - 1` and scale in float32
- GeGLU feed-forward; head tied to the embedding

Numbers follow Hugging Face's `modeling_gemma.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import ScaledDecoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("gemma")
class GemmaConfig(EasyDeLBaseConfig, transformers.GemmaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gemma"


class GemmaDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GemmaConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=GatedMLP(parts),
        )


class GemmaModel(ScaledDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = GemmaConfig
    layer_class = GemmaDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, offset=1.0, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=GemmaConfig, model_type="gemma")
class GemmaForCausalLM(CausalLM):
    """Gemma with a language-model head."""

    body_class = GemmaModel
